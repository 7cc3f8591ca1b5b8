// The host side of the model's CUDA kernels: one function per kernel or pair of kernels, which
// enqueues on `stream` and returns what the launch returned. Plain arguments only, so that nvcc
// reads nothing of the runtime. Shapes and formulas are those of model/kernels.h, whose words N, C,
// H, D and V are used here. Nothing is launched, and no pointer read, where there are no elements.
//
// Every sum is in float32 or wider and in an order that depends on shapes only.
#ifndef DIM0_MODEL_CUDA_LAUNCH_H_
#define DIM0_MODEL_CUDA_LAUNCH_H_

#include <cuda_runtime.h>

#include <cstdint>

#include "runtime/cuda/element_type.h"

namespace dim0::cuda {

// Device memory and the type of its elements. It may start anywhere its elements may.
struct Array {
  void* data = nullptr;
  ElementType type = ElementType::kFloat32;
};

// Floats of workspace, aligned to 16 bytes, that LayerNormBackward of up to `width` columns,
// ColumnSums of up to 4 x `width`, and CrossEntropy need for up to so many tokens.
int64_t WorkspaceFloats(int64_t tokens, int64_t width);

// Activations `out`; parameters wte, wpe of one type. A token outside [0, vocabulary) makes its row
// NaN, which the loss then shows.
cudaError_t LaunchEmbeddingForward(const int32_t* tokens, int64_t count, int64_t seq_len,
                                   int64_t vocabulary, int64_t width, Array wte, Array wpe,
                                   Array out, cudaStream_t stream);
// dwte [vocabulary, C] and dwpe [positions, C] of one type.
cudaError_t LaunchEmbeddingBackward(const int32_t* tokens, int64_t count, int64_t seq_len,
                                    int64_t vocabulary, int64_t positions, int64_t width,
                                    Array dout, Array dwte, Array dwpe, cudaStream_t stream);

// `delta` and `sum` null: LayerNorm of x alone. x, delta, sum and y have one type, gain and bias
// another.
cudaError_t LaunchLayerNormForward(Array x, Array delta, Array gain, Array bias, Array sum, Array y,
                                   float* mean, float* rstd, int64_t rows, int64_t width,
                                   cudaStream_t stream);
// dx = or += by `accumulate_dx`; dgain and dbias, of one type, by `accumulate_parameters`.
cudaError_t LaunchLayerNormBackward(Array dy, Array x, Array gain, const float* mean,
                                    const float* rstd, Array dx, bool accumulate_dx, Array dgain,
                                    Array dbias, bool accumulate_parameters, int64_t rows,
                                    int64_t width, float* workspace, cudaStream_t stream);

// sums [cols] = or += the sums of the columns of `values` [rows, cols].
cudaError_t LaunchColumnSums(Array values, int64_t rows, int64_t cols, Array sums, bool accumulate,
                             float* workspace, cudaStream_t stream);

cudaError_t LaunchGeluForward(Array x, Array y, int64_t size, cudaStream_t stream);
cudaError_t LaunchGeluBackward(Array dy, Array x, Array dx, int64_t size, cudaStream_t stream);

// Of rows `row_length` elements apart the first `vocabulary`. `write_gradient`: they become their
// gradient. A target outside [-1, V) makes the loss NaN.
cudaError_t LaunchCrossEntropy(Array logits, const int32_t* targets, int64_t rows,
                               int64_t vocabulary, int64_t row_length, bool write_gradient,
                               float scale, double* loss_sum, float* workspace,
                               cudaStream_t stream);

struct AttentionSize {
  int64_t batch;
  int64_t seq_len;
  int64_t heads;
  int64_t head_size;
};

cudaError_t LaunchAttentionForward(const AttentionSize& size, Array qkv, Array out,
                                   float* logsumexp, cudaStream_t stream);
// `workspace`: a float per element of logsumexp.
cudaError_t LaunchAttentionBackward(const AttentionSize& size, Array dout, Array qkv, Array out,
                                    const float* logsumexp, Array dqkv, float* workspace,
                                    cudaStream_t stream);
cudaError_t LaunchAttentionDecode(int64_t heads, int64_t head_size, int64_t position, Array qkv,
                                  Array keys, Array values, Array out, cudaStream_t stream);

}  // namespace dim0::cuda

#endif  // DIM0_MODEL_CUDA_LAUNCH_H_
