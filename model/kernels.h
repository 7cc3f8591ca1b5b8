// The operations a GPT-2 is made of, as a seam: the model is written once against this class and
// each backend implements it in its own folder. Every method enqueues on `stream` and returns at
// once; tensors must live until the stream has passed. Shapes are checked as invariants.
//
// N = B*T tokens, C = width, H heads, D = C/H, V = vocabulary. Gradients named d... are with
// respect to the mean loss. A `Write` says whether a gradient is written or added to what is there.
//
// Types are those of ModelTypes: weight, gain, bias and the tables wte and wpe are parameters;
// dweight, dgain, dbias, dwte and dwpe are gradients; mean, rstd and logsumexp are float32 and the
// loss float64; all other tensors are activations. Arithmetic and sums are in float32 or wider
// whatever the types, and each result is rounded once, to nearest, ties to even.
#ifndef DIM0_MODEL_KERNELS_H_
#define DIM0_MODEL_KERNELS_H_

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "runtime/device.h"
#include "runtime/stream.h"
#include "runtime/tensor.h"

namespace dim0 {

enum class Write : bool { kOverwrite, kAccumulate };

// Each float32 or bfloat16.
struct ModelTypes {
  DType parameters = DType::kFloat32;
  DType activations = DType::kFloat32;
  DType gradients = DType::kFloat32;  // of parameters
};

struct AttentionShape {
  int64_t batch;    // B
  int64_t seq_len;  // T
  int64_t heads;    // H
};

// The length of a row of logits in memory: the V of them, and unused columns that fill whole pieces
// of 128 bytes in either type, because matrix products and 16-byte accesses want every row aligned
// and a vocabulary may be odd. Nobody reads or writes what is in the unused columns.
inline int64_t LogitColumns(int64_t vocabulary) { return (vocabulary + 63) / 64 * 64; }

class Kernels {
 public:
  virtual ~Kernels() = default;

  // What a model computes in here whose parameters are gathered as `gathered` and whose gradients
  // are reduced as `reduced`. No other types are given to the methods below.
  virtual ModelTypes TypesFor(DType gathered, DType reduced) const = 0;

  // Makes what the first ops would otherwise make: a backend's handles and their memory. For before
  // other ranks of the process can be waiting for this one, since what allocates device memory then
  // may wait for them. Errors: the backend's.
  virtual absl::Status Prepare() { return absl::OkStatus(); }

  // Bytes of device memory that the ops need beside their arguments, for up to `tokens` tokens of a
  // model of that width, whose biases have up to 4 x `width` elements; 0 if none.
  virtual int64_t WorkspaceBytes(int64_t /*tokens*/, int64_t /*width*/, int64_t /*heads*/) const {
    return 0;
  }
  // The memory for that, before the first op; AttentionDecode and the forwards of embeddings, norms
  // and linear maps do without. It must live as long as tensors must. The ops share it, so they
  // must be enqueued on one stream.
  virtual void SetWorkspace(void* /*workspace*/) {}

  // out[n, :] = wte[tokens[n], :] + wpe[n mod T, :]. tokens: N int32 in [0, V). wte [V, C], wpe [P,
  // C] with P >= T, out [N, C].
  virtual void EmbeddingForward(Stream& stream, const int32_t* tokens, int64_t seq_len,
                                const Tensor& wte, const Tensor& wpe, const Tensor& out) = 0;
  // Overwrites dwte and dwpe, rows that no token uses with 0. Sums over tokens in a fixed order
  // whatever the number of threads.
  virtual void EmbeddingBackward(Stream& stream, const int32_t* tokens, int64_t seq_len,
                                 const Tensor& dout, const Tensor& dwte, const Tensor& dwpe) = 0;

  // y = gain * (x - mean) * rstd + bias per row, eps 1e-5. x, y [N, C]; gain, bias [C]; mean, rstd
  // [N].
  virtual void LayerNormForward(Stream& stream, const Tensor& x, const Tensor& gain,
                                const Tensor& bias, const Tensor& y, const Tensor& mean,
                                const Tensor& rstd) = 0;
  // sum = x + delta, and y = LayerNorm(sum), in one pass. sum may be x or delta itself.
  virtual void AddLayerNormForward(Stream& stream, const Tensor& x, const Tensor& delta,
                                   const Tensor& gain, const Tensor& bias, const Tensor& sum,
                                   const Tensor& y, const Tensor& mean, const Tensor& rstd) = 0;
  // dx += the gradient through the norm (dx holds the residual path's gradient, or zeros); with
  // `write_dx` kOverwrite dx is written instead. x is the norm's input.
  virtual void LayerNormBackward(Stream& stream, const Tensor& dy, const Tensor& x,
                                 const Tensor& gain, const Tensor& mean, const Tensor& rstd,
                                 const Tensor& dx, Write write_dx, const Tensor& dgain,
                                 const Tensor& dbias, Write write_parameters) = 0;

  // y [N, out] = x [N, in] weight^T + bias; weight [out, in], bias [out] or empty (rows == 0). y
  // may have more columns than `out`, which keep what they hold.
  virtual void LinearForward(Stream& stream, const Tensor& x, const Tensor& weight,
                             const Tensor& bias, const Tensor& y) = 0;
  // y [N, out] = x weight^T + bias + residual. y may be the residual.
  virtual void LinearAddForward(Stream& stream, const Tensor& x, const Tensor& weight,
                                const Tensor& bias, const Tensor& residual, const Tensor& y) = 0;
  // up [N, out] = x weight^T + bias, y = gelu(up), with gelu(x) = 0.5 x (1 + tanh(sqrt(2/pi) (x +
  // 0.044715 x^3))).
  virtual void LinearGeluForward(Stream& stream, const Tensor& x, const Tensor& weight,
                                 const Tensor& bias, const Tensor& up, const Tensor& y) = 0;
  // dx [N, in] = dy weight, always written; skipped when dx.rows == 0. dweight = dy^T x, dbias =
  // column sums of dy (skipped when dbias.rows == 0), both per `write`. Without dbias, dy may have
  // more columns than `out`, which are not read.
  virtual void LinearBackward(Stream& stream, const Tensor& dy, const Tensor& x,
                              const Tensor& weight, const Tensor& dx, const Tensor& dweight,
                              const Tensor& dbias, Write write) = 0;

  // The same of a linear map whose input is x = gelu(up), and on through the GELU: dup [N, in] =
  // (dy weight) * gelu'(up), always written.
  virtual void GeluLinearBackward(Stream& stream, const Tensor& dy, const Tensor& up,
                                  const Tensor& x, const Tensor& weight, const Tensor& dup,
                                  const Tensor& dweight, const Tensor& dbias, Write write) = 0;

  // Causal self-attention, scale 1/sqrt(D). qkv [N, 3C]: q, k, v side by side, each by head. out
  // [N, C]. logsumexp [B*H, T] of the scaled, masked scores is all that is kept for backward;
  // scores exist in tiles only.
  virtual void AttentionForward(Stream& stream, const AttentionShape& shape, const Tensor& qkv,
                                const Tensor& out, const Tensor& logsumexp) = 0;
  virtual void AttentionBackward(Stream& stream, const AttentionShape& shape, const Tensor& dout,
                                 const Tensor& qkv, const Tensor& out, const Tensor& logsumexp,
                                 const Tensor& dqkv) = 0;
  // One new token against a cache, for generation: qkv [1, 3C]; stores its k and v as row
  // `position` of keys and values [P, C], then attends over rows 0..position. out [1, C].
  virtual void AttentionDecode(Stream& stream, int64_t heads, int64_t position, const Tensor& qkv,
                               const Tensor& keys, const Tensor& values, const Tensor& out) = 0;

  // *loss_sum (float64, device memory) += sum over the N tokens of -log softmax(logits)[target];
  // targets: N int32 in [0, V), V being `vocabulary`, or -1 for a token that does not count. logits
  // [N, V or more]: of each row the first V columns, which are not changed; the others are not
  // read.
  virtual void CrossEntropyForward(Stream& stream, const Tensor& logits, int64_t vocabulary,
                                   const int32_t* targets, double* loss_sum) = 0;
  // The same, and the V columns become their own gradient, (softmax - onehot) * scale (0 for target
  // -1), in place: no second buffer of their size exists. The others keep what they hold.
  virtual void CrossEntropyForwardBackward(Stream& stream, const Tensor& logits, int64_t vocabulary,
                                           const int32_t* targets, float scale,
                                           double* loss_sum) = 0;
};

// Kernels for `device`'s backend; `device` outlives them.
std::unique_ptr<Kernels> CreateKernels(Device& device);

}  // namespace dim0

#endif  // DIM0_MODEL_KERNELS_H_
