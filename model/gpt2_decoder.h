// Generation: a GPT-2 with its weights in one place, fed one token at a time against a key and
// value cache.
#ifndef DIM0_MODEL_GPT2_DECODER_H_
#define DIM0_MODEL_GPT2_DECODER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "model/gpt2.h"
#include "model/kernels.h"
#include "runtime/allocator.h"
#include "runtime/device.h"
#include "runtime/safetensors.h"

namespace dim0 {

class Gpt2Decoder {
 public:
  // Loads `folder`/config.json and model.safetensors (float32, float16 or bfloat16; Hugging Face's
  // names, with or without the prefix "transformer."). `device` outlives the decoder. Errors name
  // the file and the tensor that is missing or has another shape.
  static absl::StatusOr<std::unique_ptr<Gpt2Decoder>> Load(const std::string& folder,
                                                           Device& device);

  const Gpt2Config& config() const { return config_; }

  // Feeds one token in [0, vocab) and returns the next token's logits, vocab of them, valid until
  // the next call. When the positions are used up, the later half of the context is fed again and
  // the rest forgotten.
  absl::StatusOr<absl::Span<const float>> Next(int32_t token);

 private:
  Gpt2Decoder(const Gpt2Config& config, Device& device);
  absl::Status Allocate();
  // The tensors of all units' parameters, in their order.
  absl::StatusOr<std::vector<const SafetensorsFile::Tensor*>> FindWeights(
      const SafetensorsFile& file) const;
  absl::Status LoadWeights(const SafetensorsFile& file,
                           absl::Span<const SafetensorsFile::Tensor* const> tensors);
  absl::Status Feed(int32_t token);

  const Gpt2Config config_;
  Device& device_;
  Allocator allocator_;
  const std::unique_ptr<Kernels> kernels_;
  const ModelTypes types_;
  const std::vector<UnitSpec> units_;

  std::vector<std::vector<Tensor>> parameters_;  // by unit
  Buffer weights_;
  std::vector<Tensor> keys_, values_;  // by layer, [P, C]
  Buffer cache_;
  Tensor residual_, norm_, qkv_, attention_, up_, gelu_, branch_, mean_, rstd_, logits_;
  Buffer scratch_;
  Buffer token_id_;
  int32_t next_token_ = 0;        // host copy of token_id_
  std::vector<int32_t> context_;  // tokens in the cache
  std::vector<float> host_logits_;
  std::unique_ptr<Stream> stream_;  // last: its work uses the rest
};

}  // namespace dim0

#endif  // DIM0_MODEL_GPT2_DECODER_H_
