// Kernels on a GPU. Matrix products go through cuBLASLt, everything else is ours. Two runs are
// bit-identical: every sum has one order, which depends on shapes only.
//
// Bytes that an op moves per element of its [N, C] (or [N, 4C], [N, V]) tensors, with activations
// of a bytes, as OpInfo.bytes has it; parameters, their gradients and statistics come on top:
//   embedding forward                 a, and as much of the tables as the tokens name
//   embedding backward                2a (dout is read for both tables)
//   LayerNorm forward                 2a; with the addition before it 4a
//   LayerNorm backward                3a, or 4a where dx is added to
//   cross-entropy                     a; with its gradient 2a
//   bias gradients                    a, of dy, beside LinearBackward's products
//   attention forward, backward      4a, 8a
#ifndef DIM0_MODEL_CUDA_CUDA_KERNELS_H_
#define DIM0_MODEL_CUDA_CUDA_KERNELS_H_

#include <memory>

#include "model/kernels.h"
#include "runtime/device.h"

namespace dim0::cuda {

// `device` is a CUDA device and outlives the kernels.
std::unique_ptr<Kernels> CreateCudaKernels(Device& device);

}  // namespace dim0::cuda

#endif  // DIM0_MODEL_CUDA_CUDA_KERNELS_H_
