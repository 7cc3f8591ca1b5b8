// NVTX's marks for Nsight. Without a profiler attached the real ones do nothing, either; these
// check that ranges are closed as often as they are opened.
#ifndef DIM0_TESTS_SIMT_INCLUDE_NVTX3_NVTOOLSEXT_H_
#define DIM0_TESTS_SIMT_INCLUDE_NVTX3_NVTOOLSEXT_H_

#include <cstdint>

namespace dim0::simt {
inline thread_local int nvtx_depth = 0;
}  // namespace dim0::simt

using nvtxRangeId_t = uint64_t;
using nvtxDomainHandle_t = struct nvtxDomainRegistration_st*;

// The depth of the range, from 0 on.
inline int nvtxRangePushA(const char* /*name*/) { return dim0::simt::nvtx_depth++; }
// The depth of the range that ends; negative if none was open.
inline int nvtxRangePop() { return dim0::simt::nvtx_depth > 0 ? --dim0::simt::nvtx_depth : -1; }
inline void nvtxMarkA(const char* /*name*/) {}
inline void nvtxNameOsThreadA(uint32_t /*thread*/, const char* /*name*/) {}

#endif  // DIM0_TESTS_SIMT_INCLUDE_NVTX3_NVTOOLSEXT_H_
