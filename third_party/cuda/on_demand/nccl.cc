// NCCL's functions, as far as the project calls them.
#include <nccl.h>

#include "third_party/cuda/on_demand/library.h"

namespace {

dim0::on_demand::Library& LoadedLibrary() {
  static dim0::on_demand::Library library(DIM0_NCCL_FILE);
  return library;
}

}  // namespace

DIM0_ON_DEMAND(ncclResult_t, ncclGetVersion, ncclSystemError, (int* version), (version))
DIM0_ON_DEMAND(ncclResult_t, ncclGetUniqueId, ncclSystemError, (ncclUniqueId * id), (id))
DIM0_ON_DEMAND(ncclResult_t, ncclCommInitRankConfig, ncclSystemError,
               (ncclComm_t * made, int ranks, ncclUniqueId id, int rank, ncclConfig_t* config),
               (made, ranks, id, rank, config))
DIM0_ON_DEMAND(ncclResult_t, ncclCommFinalize, ncclSystemError, (ncclComm_t comm), (comm))
DIM0_ON_DEMAND(ncclResult_t, ncclCommDestroy, ncclSystemError, (ncclComm_t comm), (comm))
DIM0_ON_DEMAND(ncclResult_t, ncclCommAbort, ncclSystemError, (ncclComm_t comm), (comm))
DIM0_ON_DEMAND(ncclResult_t, ncclCommGetAsyncError, ncclSystemError,
               (ncclComm_t comm, ncclResult_t* error), (comm, error))
DIM0_ON_DEMAND(ncclResult_t, ncclReduce, ncclSystemError,
               (const void* send, void* receive, size_t count, ncclDataType_t type, ncclRedOp_t op,
                int root, ncclComm_t comm, cudaStream_t stream),
               (send, receive, count, type, op, root, comm, stream))
DIM0_ON_DEMAND(ncclResult_t, ncclBroadcast, ncclSystemError,
               (const void* send, void* receive, size_t count, ncclDataType_t type, int root,
                ncclComm_t comm, cudaStream_t stream),
               (send, receive, count, type, root, comm, stream))
DIM0_ON_DEMAND(ncclResult_t, ncclAllReduce, ncclSystemError,
               (const void* send, void* receive, size_t count, ncclDataType_t type, ncclRedOp_t op,
                ncclComm_t comm, cudaStream_t stream),
               (send, receive, count, type, op, comm, stream))
DIM0_ON_DEMAND(ncclResult_t, ncclReduceScatter, ncclSystemError,
               (const void* send, void* receive, size_t count, ncclDataType_t type, ncclRedOp_t op,
                ncclComm_t comm, cudaStream_t stream),
               (send, receive, count, type, op, comm, stream))
DIM0_ON_DEMAND(ncclResult_t, ncclAllGather, ncclSystemError,
               (const void* send, void* receive, size_t count, ncclDataType_t type, ncclComm_t comm,
                cudaStream_t stream),
               (send, receive, count, type, comm, stream))
DIM0_ON_DEMAND(ncclResult_t, ncclSend, ncclSystemError,
               (const void* send, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                cudaStream_t stream),
               (send, count, type, peer, comm, stream))
DIM0_ON_DEMAND(ncclResult_t, ncclRecv, ncclSystemError,
               (void* receive, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                cudaStream_t stream),
               (receive, count, type, peer, comm, stream))
DIM0_ON_DEMAND(ncclResult_t, ncclGroupStart, ncclSystemError, (), ())
DIM0_ON_DEMAND(ncclResult_t, ncclGroupEnd, ncclSystemError, (), ())
DIM0_ON_DEMAND(const char*, ncclGetErrorString, LoadedLibrary().error(), (ncclResult_t result),
               (result))
DIM0_ON_DEMAND(const char*, ncclGetLastError, "", (ncclComm_t comm), (comm))
