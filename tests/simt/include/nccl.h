// The part of NCCL that this project uses, for the emulator: the ranks are threads of one process,
// each on a device of its own. Names, values and rules are NCCL's (NCCL user guide). Every call
// counts for simt::FailCall.
//   - An operation, or a group as one, runs when it is at the head of its stream and so are those
//     of the other ranks that take part. Ranks that call for different things, or do not call, wait
//     until ncclCommAbort lets the streams go.
//   - A call on a communicator made with `blocking` 0 may return ncclInProgress; then nothing is
//     enqueued until ncclCommGetAsyncError has been asked often enough to say ncclSuccess.
//   - Sums are in rank order, of 16-bit types in float32 and rounded once.
//   - In a group, one communicator's operations are on one stream.
#ifndef DIM0_TESTS_SIMT_INCLUDE_NCCL_H_
#define DIM0_TESTS_SIMT_INCLUDE_NCCL_H_

#include <cuda_runtime.h>

#include <climits>
#include <cstddef>

#define NCCL_MAJOR 2
#define NCCL_MINOR 28
#define NCCL_PATCH 9
#define NCCL_VERSION(major, minor, patch) ((major)*10000 + (minor)*100 + (patch))
#define NCCL_VERSION_CODE NCCL_VERSION(NCCL_MAJOR, NCCL_MINOR, NCCL_PATCH)
#define NCCL_UNIQUE_ID_BYTES 128
#define NCCL_CONFIG_UNDEF_INT INT_MIN

using ncclComm_t = struct ncclComm*;

struct ncclUniqueId {
  char internal[NCCL_UNIQUE_ID_BYTES];
};

enum ncclResult_t {
  ncclSuccess = 0,
  ncclUnhandledCudaError = 1,
  ncclSystemError = 2,
  ncclInternalError = 3,
  ncclInvalidArgument = 4,
  ncclInvalidUsage = 5,
  ncclRemoteError = 6,
  ncclInProgress = 7,
  ncclNumResults = 8,
};

enum ncclRedOp_t { ncclSum = 0, ncclProd = 1, ncclMax = 2, ncclMin = 3, ncclAvg = 4 };

enum ncclDataType_t {
  ncclInt8 = 0,
  ncclChar = 0,
  ncclUint8 = 1,
  ncclInt32 = 2,
  ncclInt = 2,
  ncclUint32 = 3,
  ncclInt64 = 4,
  ncclUint64 = 5,
  ncclFloat16 = 6,
  ncclHalf = 6,
  ncclFloat32 = 7,
  ncclFloat = 7,
  ncclFloat64 = 8,
  ncclDouble = 8,
  ncclBfloat16 = 9,
  ncclNumTypes = 12,
};

struct ncclConfig_t {
  size_t size;
  unsigned magic;
  unsigned version;
  int blocking;
  int cgaClusterSize;
  int minCTAs;
  int maxCTAs;
  const char* netName;
  int splitShare;
  int trafficClass;
  const char* commName;
};

#define NCCL_CONFIG_INITIALIZER                                                       \
  {                                                                                   \
    sizeof(ncclConfig_t), 0xcafebeef, NCCL_VERSION_CODE, NCCL_CONFIG_UNDEF_INT,       \
        NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT, nullptr, \
        NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT, nullptr                         \
  }

const char* ncclGetErrorString(ncclResult_t result);
// Of the last error, whichever the communicator.
const char* ncclGetLastError(ncclComm_t comm);
ncclResult_t ncclGetVersion(int* version);

ncclResult_t ncclGetUniqueId(ncclUniqueId* id);
ncclResult_t ncclCommInitRank(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank);
ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t* config);
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* result);
ncclResult_t ncclCommFinalize(ncclComm_t comm);
ncclResult_t ncclCommDestroy(ncclComm_t comm);
ncclResult_t ncclCommAbort(ncclComm_t comm);
ncclResult_t ncclCommCount(ncclComm_t comm, int* ranks);
ncclResult_t ncclCommUserRank(ncclComm_t comm, int* rank);
ncclResult_t ncclCommCuDevice(ncclComm_t comm, int* device);
ncclResult_t ncclCommRegister(ncclComm_t comm, void* buffer, size_t bytes, void** handle);
ncclResult_t ncclCommDeregister(ncclComm_t comm, void* handle);
ncclResult_t ncclMemAlloc(void** pointer, size_t bytes);
ncclResult_t ncclMemFree(void* pointer);

ncclResult_t ncclGroupStart();
ncclResult_t ncclGroupEnd();

ncclResult_t ncclAllGather(const void* send, void* receive, size_t send_count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclReduceScatter(const void* send, void* receive, size_t receive_count,
                               ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                               cudaStream_t stream);
ncclResult_t ncclAllReduce(const void* send, void* receive, size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclReduce(const void* send, void* receive, size_t count, ncclDataType_t type,
                        ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclBroadcast(const void* send, void* receive, size_t count, ncclDataType_t type,
                           int root, ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclSend(const void* send, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclRecv(void* receive, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream);

#endif  // DIM0_TESTS_SIMT_INCLUDE_NCCL_H_
