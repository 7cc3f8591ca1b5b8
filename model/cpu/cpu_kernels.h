// Kernels on a CPU rank's thread pool. Work is cut by shapes and the number of threads only, so
// results repeat exactly. All but LinearForward's and LinearBackward's matrix products are also
// bit-identical for every number of threads: no sum crosses a cut.
#ifndef DIM0_MODEL_CPU_CPU_KERNELS_H_
#define DIM0_MODEL_CPU_CPU_KERNELS_H_

#include <cstdint>

#include "model/kernels.h"
#include "runtime/cpu/cpu_device.h"

namespace dim0::cpu {

class CpuKernels : public Kernels {
 public:
  explicit CpuKernels(CpuDevice& device) : pool_(device.pool()) {}

  // float32 throughout.
  ModelTypes TypesFor(DType /*gathered*/, DType /*reduced*/) const override { return {}; }

  void EmbeddingForward(Stream& stream, const int32_t* tokens, int64_t seq_len, const Tensor& wte,
                        const Tensor& wpe, const Tensor& out) override;
  void EmbeddingBackward(Stream& stream, const int32_t* tokens, int64_t seq_len, const Tensor& dout,
                         const Tensor& dwte, const Tensor& dwpe) override;
  void LayerNormForward(Stream& stream, const Tensor& x, const Tensor& gain, const Tensor& bias,
                        const Tensor& y, const Tensor& mean, const Tensor& rstd) override;
  void AddLayerNormForward(Stream& stream, const Tensor& x, const Tensor& delta, const Tensor& gain,
                           const Tensor& bias, const Tensor& sum, const Tensor& y,
                           const Tensor& mean, const Tensor& rstd) override;
  void LayerNormBackward(Stream& stream, const Tensor& dy, const Tensor& x, const Tensor& gain,
                         const Tensor& mean, const Tensor& rstd, const Tensor& dx, Write write_dx,
                         const Tensor& dgain, const Tensor& dbias, Write write_parameters) override;
  void LinearForward(Stream& stream, const Tensor& x, const Tensor& weight, const Tensor& bias,
                     const Tensor& y) override;
  void LinearAddForward(Stream& stream, const Tensor& x, const Tensor& weight, const Tensor& bias,
                        const Tensor& residual, const Tensor& y) override;
  void LinearGeluForward(Stream& stream, const Tensor& x, const Tensor& weight, const Tensor& bias,
                         const Tensor& up, const Tensor& y) override;
  void LinearBackward(Stream& stream, const Tensor& dy, const Tensor& x, const Tensor& weight,
                      const Tensor& dx, const Tensor& dweight, const Tensor& dbias,
                      Write write) override;
  void GeluLinearBackward(Stream& stream, const Tensor& dy, const Tensor& up, const Tensor& x,
                          const Tensor& weight, const Tensor& dup, const Tensor& dweight,
                          const Tensor& dbias, Write write) override;
  void AttentionForward(Stream& stream, const AttentionShape& shape, const Tensor& qkv,
                        const Tensor& out, const Tensor& logsumexp) override;
  void AttentionBackward(Stream& stream, const AttentionShape& shape, const Tensor& dout,
                         const Tensor& qkv, const Tensor& out, const Tensor& logsumexp,
                         const Tensor& dqkv) override;
  void AttentionDecode(Stream& stream, int64_t heads, int64_t position, const Tensor& qkv,
                       const Tensor& keys, const Tensor& values, const Tensor& out) override;
  void CrossEntropyForward(Stream& stream, const Tensor& logits, int64_t vocabulary,
                           const int32_t* targets, double* loss_sum) override;
  void CrossEntropyForwardBackward(Stream& stream, const Tensor& logits, int64_t vocabulary,
                                   const int32_t* targets, float scale, double* loss_sum) override;

 private:
  // y = gelu(x); dx = dy * gelu'(x). Same shapes; the result may be either operand.
  void GeluForward(Stream& stream, const Tensor& x, const Tensor& y);
  void GeluBackward(Stream& stream, const Tensor& dy, const Tensor& x, const Tensor& dx);

  ThreadPool& pool_;
};

}  // namespace dim0::cpu

#endif  // DIM0_MODEL_CPU_CPU_KERNELS_H_
