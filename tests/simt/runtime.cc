#include "tests/simt/runtime.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <thread>

#include "tests/simt/block.h"
#include "tests/simt/memory.h"
#include "tests/simt/symbols.h"

namespace dim0::simt {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kMaxDevices = 16;
constexpr size_t kStaticSharedBytes = size_t{48} << 10;  // without opting in to more
constexpr int kDriverVersion = 13000;

// What one call of cudaEventRecord made: whoever waits for it goes on doing so when the event is
// recorded again, perhaps on a stream that gets there sooner.
struct RecordedPoint {
  bool passed = false;
  Clock::time_point time;
};

struct EventState {
  int device = 0;
  unsigned flags = 0;
  std::shared_ptr<RecordedPoint> last;  // null if never recorded
};

struct Device {
  cudaError_t error = cudaSuccess;  // once it has failed
  std::shared_ptr<StreamState> default_stream;
  uint64_t release_threshold = 0;
  int64_t most_used = 0;
  std::set<int> peers;
};

int64_t EnvironmentNumber(const char* name, int64_t otherwise, int64_t least, int64_t most) {
  const char* text = std::getenv(name);
  if (!text || !*text) return otherwise;
  char* end = nullptr;
  const long long value = std::strtoll(text, &end, 10);
  if (*end || value < least || value > most) {
    std::fprintf(stderr, "simt: %s=%s: must be a number from %lld to %lld\n", name, text,
                 static_cast<long long>(least), static_cast<long long>(most));
    std::exit(2);
  }
  return value;
}

Settings SettingsFromEnvironment() {
  Settings settings;
  settings.devices =
      static_cast<int>(EnvironmentNumber("DIM0_SIMT_DEVICES", settings.devices, 0, kMaxDevices));
  settings.memory_bytes =
      EnvironmentNumber("DIM0_SIMT_MEMORY", settings.memory_bytes, 0, int64_t{64} << 30);
  settings.shared_bytes = static_cast<int>(EnvironmentNumber(
      "DIM0_SIMT_SHARED", settings.shared_bytes, kStaticSharedBytes, kMaxSharedBytes - 1024));
  settings.seed = EnvironmentNumber("DIM0_SIMT_SEED", 1, 0, std::numeric_limits<int64_t>::max());
  settings.races = EnvironmentNumber("DIM0_SIMT_RACES", 0, 0, 1) == 1;
  settings.lazy = EnvironmentNumber("DIM0_SIMT_LAZY", 0, 0, 1) == 1;
  settings.nccl_in_order = EnvironmentNumber("DIM0_SIMT_NCCL_IN_ORDER", 0, 0, 1) == 1;
  settings.loads = EnvironmentNumber("DIM0_SIMT_LOADS", 0, 0, 1) == 1;
  settings.no_code = EnvironmentNumber("DIM0_SIMT_NO_CODE", 0, 0, 1) == 1;
  settings.abort_hangs = EnvironmentNumber("DIM0_SIMT_ABORT_HANGS", 0, 0, 1) == 1;
  if (const char* order = std::getenv("DIM0_SIMT_ORDER")) {
    if (std::strcmp(order, "shuffled") == 0) {
      settings.order = ThreadOrder::kShuffled;
    } else if (std::strcmp(order, "forward") == 0) {
      settings.order = ThreadOrder::kForward;
    } else if (std::strcmp(order, "reverse") == 0) {
      settings.order = ThreadOrder::kReverse;
    } else {
      std::fprintf(stderr, "simt: DIM0_SIMT_ORDER=%s: must be shuffled, forward or reverse\n",
                   order);
      std::exit(2);
    }
  }
  return settings;
}

// All state. Kept until the process ends: streams may outlive static objects.
class Runtime {
 public:
  static Runtime& Get() {
    static Runtime& runtime = *new Runtime;
    return runtime;
  }

  std::mutex mutex;
  std::condition_variable changed;
  Settings settings;
  std::vector<Device> devices;
  std::vector<std::shared_ptr<StreamState>> streams;  // with the default ones
  // Handles are numbers: never used again, and nothing to look into.
  std::map<cudaStream_t, std::shared_ptr<StreamState>> stream_handles;
  std::map<cudaEvent_t, std::shared_ptr<EventState>> events;
  uintptr_t next_handle = 0;
  std::map<std::pair<int, const void*>, int> dynamic_shared_limit;  // by device and kernel
  std::set<std::pair<int, const void*>> loaded;                     // device and kernel
  bool loading = false;  // a thread keeps the others out of CUDA
  int64_t calls = 0;
  int64_t allocations = 0;
  int64_t fail_at = 0;  // call number; 0: none
  int64_t hang_at = 0;
  std::string failed_call;
  int host_threads_waiting = 0;
  bool polled = false;      // see Poll
  bool busy = false;        // an operation is running
  bool look_again = false;  // see LookAgain
  uint64_t operations = 0;
  std::mt19937_64 random;

  void MakeDevices() {
    devices.assign(settings.devices, Device());
    streams.clear();
    for (int i = 0; i < settings.devices; ++i) {
      auto stream = std::make_shared<StreamState>();
      stream->device = i;
      stream->is_default = true;
      devices[i].default_stream = stream;
      streams.push_back(stream);
    }
    random.seed(settings.seed);
  }

  void StartThread() {
    if (thread_started_) return;
    thread_started_ = true;
    std::thread([this] { Loop(); }).detach();
  }

  bool Runnable(const StreamState& stream) const {
    if (stream.queue.empty()) return false;
    const StreamState::Operation& next = stream.queue.front();
    for (const auto& [other, point] : next.after) {
      if (other->completed < point) return false;
    }
    // A failed device does not wait for what others would have to do.
    if (devices[stream.device].error != cudaSuccess && !next.always) return true;
    return !next.ready || next.ready();
  }

 private:
  Runtime() {
    settings = SettingsFromEnvironment();
    constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
    fail_at = EnvironmentNumber("DIM0_SIMT_FAIL_CALL", 0, 0, kMost);
    hang_at = EnvironmentNumber("DIM0_SIMT_HANG_CALL", 0, 0, kMost);
    MakeDevices();
    InstallFaultHandler();
  }

  std::shared_ptr<StreamState> Pick() {
    if (settings.lazy && host_threads_waiting == 0 && !polled) return nullptr;
    std::vector<std::shared_ptr<StreamState>> runnable;
    do {
      look_again = false;
      runnable.clear();
      for (const auto& stream : streams) {
        if (Runnable(*stream)) runnable.push_back(stream);
      }
    } while (look_again);
    if (runnable.empty()) return nullptr;
    return runnable[random() % runnable.size()];
  }

  void Loop() {
    std::unique_lock<std::mutex> lock(mutex);
    while (true) {
      std::shared_ptr<StreamState> stream;
      while (!(stream = Pick())) changed.wait(lock);
      polled = false;
      busy = true;
      ++operations;
      // It stays in the queue while it runs, but nobody else looks at it there.
      StreamState::Operation operation = std::move(stream->queue.front());
      const bool skip = devices[stream->device].error != cudaSuccess && !operation.always;
      lock.unlock();
      cudaError_t error = cudaSuccess;
      if (!skip) {
        error = operation.run();
        if (error == cudaSuccess && !operation.always) {
          const std::string damage = FindDamage(stream->device, /*thorough=*/false);
          if (!damage.empty()) {
            std::fprintf(stderr, "simt: %s: %s\n", operation.name.c_str(), damage.c_str());
            error = cudaErrorIllegalAddress;
          }
        }
      }
      operation = {};  // what it holds may call back
      lock.lock();
      if (error != cudaSuccess && devices[stream->device].error == cudaSuccess) {
        devices[stream->device].error = error;
      }
      stream->queue.pop_front();
      ++stream->completed;
      if (stream->destroyed && stream->queue.empty()) std::erase(streams, stream);
      busy = false;
      changed.notify_all();
    }
  }

  bool thread_started_ = false;
};

thread_local int current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;
// Set while a function of cudaLaunchHostFunc runs.
thread_local bool in_host_function = false;

#define SIMT_ENTER(name, failure, check)                         \
  do {                                                           \
    const cudaError_t entered = EnterCall(name, failure, check); \
    if (entered != cudaSuccess) return entered;                  \
  } while (false)

cudaError_t CheckDevice(int device) {
  const auto& runtime = Runtime::Get();
  if (runtime.devices.empty()) return SetLastError(cudaErrorNoDevice);
  if (device < 0 || device >= static_cast<int>(runtime.devices.size())) {
    return SetLastError(cudaErrorInvalidDevice);
  }
  return cudaSuccess;
}

std::shared_ptr<EventState> FindEvent(cudaEvent_t event) {
  auto& runtime = Runtime::Get();
  const std::lock_guard<std::mutex> lock(runtime.mutex);
  const auto found = runtime.events.find(event);
  return found == runtime.events.end() ? nullptr : found->second;
}

int Attribute(const Settings& settings, cudaDeviceAttr attribute, int device, bool& known) {
  known = true;
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY:
      return 1024;
    case cudaDevAttrMaxBlockDimZ:
      return 64;
    case cudaDevAttrMaxGridDimX:
      return std::numeric_limits<int>::max();
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ:
      return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      return kStaticSharedBytes;
    case cudaDevAttrWarpSize:
      return 32;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor:
      return 65536;
    case cudaDevAttrClockRate:
    case cudaDevAttrMemoryClockRate:
      return 1000000;
    case cudaDevAttrMultiProcessorCount:
      return 8;
    case cudaDevAttrIntegrated:
    case cudaDevAttrComputeMode:
    case cudaDevAttrEccEnabled:
    case cudaDevAttrPciDeviceId:
    case cudaDevAttrPciDomainId:
      return 0;
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrStreamPrioritiesSupported:
    case cudaDevAttrMemoryPoolsSupported:
      return 1;
    case cudaDevAttrPciBusId:
      return device + 1;
    case cudaDevAttrGlobalMemoryBusWidth:
      return 512;
    case cudaDevAttrL2CacheSize:
      return 4 << 20;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      return 2048;
    case cudaDevAttrAsyncEngineCount:
      return 2;
    case cudaDevAttrComputeCapabilityMajor:
      return 9;
    case cudaDevAttrComputeCapabilityMinor:
      return 0;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      return settings.shared_bytes + 1024;
    case cudaDevAttrCooperativeLaunch:
      return 0;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      return settings.shared_bytes;
    case cudaDevAttrMaxBlocksPerMultiprocessor:
      return 32;
    case cudaDevAttrReservedSharedMemoryPerBlock:
      return 1024;
  }
  known = false;
  return 0;
}

// What the device's errors and damage found now come to, for calls that wait.
cudaError_t AfterWaiting(int device, bool thorough) {
  const std::string damage = FindDamage(device, thorough);
  if (!damage.empty()) {
    std::fprintf(stderr, "simt: device %d: %s\n", device, damage.c_str());
    FailDevice(device, cudaErrorIllegalAddress);
  }
  const cudaError_t error = DeviceError(device);
  return error == cudaSuccess ? cudaSuccess : SetLastError(error);
}

void WaitForStream(const std::shared_ptr<StreamState>& stream) {
  int64_t point = 0;
  WaitUntil([&, first = true]() mutable {
    if (first) point = stream->enqueued;
    first = false;
    return stream->completed >= point;
  });
}

void WaitForDevice(int device) {
  auto& runtime = Runtime::Get();
  std::vector<std::pair<std::shared_ptr<StreamState>, int64_t>> points;
  {
    const std::lock_guard<std::mutex> lock(runtime.mutex);
    for (const auto& stream : runtime.streams) {
      if (stream->device == device) points.emplace_back(stream, stream->enqueued);
    }
  }
  WaitUntil([&] {
    return std::all_of(points.begin(), points.end(),
                       [](const auto& point) { return point.first->completed >= point.second; });
  });
}

}  // namespace

// ---- control.h

Settings GetSettings() {
  auto& runtime = Runtime::Get();
  const std::lock_guard<std::mutex> lock(runtime.mutex);
  return runtime.settings;
}

void SetSettings(const Settings& settings) {
  Change([&] {
    auto& runtime = Runtime::Get();
    runtime.settings = settings;
    runtime.random.seed(settings.seed);
  });
}

int64_t AllocationCount() {
  auto& runtime = Runtime::Get();
  const std::lock_guard<std::mutex> lock(runtime.mutex);
  return runtime.allocations;
}

int64_t CallCount() {
  auto& runtime = Runtime::Get();
  const std::lock_guard<std::mutex> lock(runtime.mutex);
  return runtime.calls;
}

void FailCall(int64_t n) {
  auto& runtime = Runtime::Get();
  const std::lock_guard<std::mutex> lock(runtime.mutex);
  runtime.fail_at = n > 0 ? runtime.calls + n : 0;
  runtime.failed_call.clear();
}

std::string FailedCall() {
  auto& runtime = Runtime::Get();
  const std::lock_guard<std::mutex> lock(runtime.mutex);
  return runtime.failed_call;
}

void Reset() {
  auto& runtime = Runtime::Get();
  std::unique_lock<std::mutex> lock(runtime.mutex);
  runtime.changed.wait(lock, [&] { return !runtime.busy; });
  std::vector<StreamState::Operation> dropped;
  for (const auto& stream : runtime.streams) {
    for (auto& operation : stream->queue) dropped.push_back(std::move(operation));
    stream->queue.clear();
    stream->completed = stream->enqueued;
  }
  runtime.stream_handles.clear();
  runtime.events.clear();
  runtime.dynamic_shared_limit.clear();
  runtime.loaded.clear();
  runtime.fail_at = 0;
  runtime.failed_call.clear();
  runtime.polled = false;
  runtime.MakeDevices();
  ForgetMemory();
  lock.unlock();
  last_error = cudaSuccess;
  current_device = 0;
}

// ---- runtime.h

cudaError_t EnterCall(const char* name, cudaError_t failure, bool check) {
  auto& runtime = Runtime::Get();
  if (in_host_function) {
    std::fprintf(stderr, "simt: %s called by a function of cudaLaunchHostFunc\n", name);
    return SetLastError(cudaErrorNotPermitted);
  }
  std::unique_lock<std::mutex> lock(runtime.mutex);
  runtime.changed.wait(lock, [&] { return !runtime.loading; });
  if (++runtime.calls == runtime.hang_at) {
    runtime.loading = true;
    runtime.changed.wait(lock, [] { return false; });
  }
  if (runtime.calls == runtime.fail_at) {
    std::fprintf(stderr, "simt: call %lld, %s, fails as it was told to: %s\n",
                 static_cast<long long>(runtime.calls), name, cudaGetErrorName(failure));
    runtime.failed_call = name;
    if (failure == cudaErrorLaunchFailure && !runtime.devices.empty()) {
      auto& error = runtime.devices[current_device].error;
      if (error == cudaSuccess) error = failure;
      runtime.changed.notify_all();
    }
    return SetLastError(failure);
  }
  if (check) {
    if (runtime.devices.empty()) return SetLastError(cudaErrorNoDevice);
    const cudaError_t error = runtime.devices[current_device].error;
    if (error != cudaSuccess) return SetLastError(error);
  }
  return cudaSuccess;
}

int CurrentDevice() { return current_device; }

cudaError_t SetLastError(cudaError_t error) {
  if (error != cudaSuccess && error != cudaErrorNotReady) last_error = error;
  return error;
}

std::shared_ptr<StreamState> FindStream(cudaStream_t stream) {
  auto& runtime = Runtime::Get();
  const std::lock_guard<std::mutex> lock(runtime.mutex);
  if (!stream) {
    return runtime.devices.empty() ? nullptr : runtime.devices[current_device].default_stream;
  }
  const auto found = runtime.stream_handles.find(stream);
  return found == runtime.stream_handles.end() ? nullptr : found->second;
}

void Enqueue(const std::shared_ptr<StreamState>& stream, StreamState::Operation operation) {
  Change([&] {
    auto& runtime = Runtime::Get();
    runtime.StartThread();
    // The default stream waits for all blocking ones, and they for it.
    if (stream->is_default) {
      for (const auto& other : runtime.streams) {
        if (other->device == stream->device && other != stream &&
            !(other->flags & cudaStreamNonBlocking)) {
          operation.after.emplace_back(other, other->enqueued);
        }
      }
    } else if (!(stream->flags & cudaStreamNonBlocking)) {
      const auto& other = runtime.devices[stream->device].default_stream;
      operation.after.emplace_back(other, other->enqueued);
    }
    stream->queue.push_back(std::move(operation));
    ++stream->enqueued;
  });
}

void WaitUntil(const std::function<bool()>& condition) {
  auto& runtime = Runtime::Get();
  std::unique_lock<std::mutex> lock(runtime.mutex);
  if (condition()) return;
  ++runtime.host_threads_waiting;
  runtime.changed.notify_all();
  runtime.changed.wait(lock, condition);
  --runtime.host_threads_waiting;
}

void Change(const std::function<void()>& change) {
  auto& runtime = Runtime::Get();
  const std::lock_guard<std::mutex> lock(runtime.mutex);
  change();
  runtime.changed.notify_all();
}

void Poll() {
  Change([] { Runtime::Get().polled = true; });
  std::this_thread::yield();
}

void LookAgain() { Runtime::Get().look_again = true; }

void WaitForRunningOperation() {
  auto& runtime = Runtime::Get();
  std::unique_lock<std::mutex> lock(runtime.mutex);
  const uint64_t running = runtime.operations;
  runtime.changed.wait(lock, [&] { return !runtime.busy || runtime.operations != running; });
}

bool NcclInOrder() { return Runtime::Get().settings.nccl_in_order; }

bool DeviceFailed(int device) { return Runtime::Get().devices[device].error != cudaSuccess; }

cudaError_t DeviceError(int device) {
  auto& runtime = Runtime::Get();
  const std::lock_guard<std::mutex> lock(runtime.mutex);
  return runtime.devices[device].error;
}

void FailDevice(int device, cudaError_t error) {
  Change([&] {
    cudaError_t& to = Runtime::Get().devices[device].error;
    if (to == cudaSuccess) to = error;
  });
}

// ---- Launches

namespace {

// Of a kernel that is launched on the current device.
cudaError_t Load(const void* kernel) {
  auto& runtime = Runtime::Get();
  bool first = false;
  {
    std::unique_lock<std::mutex> lock(runtime.mutex);
    if (runtime.settings.no_code) return SetLastError(cudaErrorNoKernelImageForDevice);
    if (!runtime.settings.loads) return cudaSuccess;
    runtime.changed.wait(lock, [&] { return !runtime.loading; });
    first = runtime.loaded.insert({current_device, kernel}).second;
    runtime.loading = first;
  }
  if (!first) return cudaSuccess;
  WaitForDevice(current_device);
  Change([&] { runtime.loading = false; });
  return cudaSuccess;
}

}  // namespace

cudaError_t LaunchKernel(const cudaLaunchConfig_t& config, const void* kernel,
                         std::function<void()> thread) {
  SIMT_ENTER("cudaLaunchKernelEx", cudaErrorLaunchFailure, true);
  const auto stream = FindStream(config.stream);
  if (!stream || stream->device != current_device) {
    return SetLastError(cudaErrorInvalidResourceHandle);
  }
  const dim3 grid = config.gridDim, block = config.blockDim;
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  const auto within = [](unsigned value, unsigned most) { return value > 0 && value <= most; };
  if (!within(grid.x, 0x7fffffff) || !within(grid.y, 65535) || !within(grid.z, 65535) ||
      !within(block.x, 1024) || !within(block.y, 1024) || !within(block.z, 64) || threads > 1024) {
    return SetLastError(cudaErrorInvalidConfiguration);
  }
  if (const cudaError_t error = Load(kernel); error != cudaSuccess) return error;
  auto& runtime = Runtime::Get();
  GridRun run;
  {
    const std::lock_guard<std::mutex> lock(runtime.mutex);
    const auto limit = runtime.dynamic_shared_limit.find({current_device, kernel});
    const size_t most = limit == runtime.dynamic_shared_limit.end()
                            ? kStaticSharedBytes
                            : std::max<size_t>(limit->second, kStaticSharedBytes);
    if (config.dynamicSmemBytes > most) return SetLastError(cudaErrorInvalidValue);
    run.order = runtime.settings.order;
    run.find_races = runtime.settings.races;
    run.seed = runtime.settings.seed;
  }
  run.name = FunctionName(kernel);
  run.grid = grid;
  run.block = block;
  run.shared_bytes = config.dynamicSmemBytes;
  run.thread = std::move(thread);
  StreamState::Operation operation;
  operation.name = run.name;
  operation.run = [run = std::move(run)]() mutable {
    run.seed += Runtime::Get().operations;
    return RunGrid(run);
  };
  Enqueue(stream, std::move(operation));
  return cudaSuccess;
}

cudaError_t SetFunctionAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  SIMT_ENTER("cudaFuncSetAttribute", cudaErrorInvalidValue, true);
  auto& runtime = Runtime::Get();
  const std::lock_guard<std::mutex> lock(runtime.mutex);
  if (attribute == cudaFuncAttributePreferredSharedMemoryCarveout) {
    return value >= -1 && value <= 100 ? cudaSuccess : SetLastError(cudaErrorInvalidValue);
  }
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0 ||
      value > runtime.settings.shared_bytes) {
    return SetLastError(cudaErrorInvalidValue);
  }
  runtime.dynamic_shared_limit[{current_device, kernel}] = value;
  return cudaSuccess;
}

cudaError_t CountResidentBlocks(int* blocks, const void* kernel, int threads, size_t shared_bytes) {
  SIMT_ENTER("cudaOccupancyMaxActiveBlocksPerMultiprocessor", cudaErrorInvalidValue, true);
  if (!blocks || threads < 1) return SetLastError(cudaErrorInvalidValue);
  auto& runtime = Runtime::Get();
  const std::lock_guard<std::mutex> lock(runtime.mutex);
  const auto limit = runtime.dynamic_shared_limit.find({current_device, kernel});
  const size_t most = limit == runtime.dynamic_shared_limit.end()
                          ? kStaticSharedBytes
                          : std::max<size_t>(limit->second, kStaticSharedBytes);
  if (threads > 1024 || shared_bytes > most) {
    *blocks = 0;
    return cudaSuccess;
  }
  const size_t rounded = (threads + 31) / 32 * 32;
  *blocks = static_cast<int>(std::min<size_t>(
      {32, 2048 / rounded, (runtime.settings.shared_bytes + 1024) / (shared_bytes + 1024)}));
  return cudaSuccess;
}

}  // namespace dim0::simt

using namespace dim0::simt;

// ---- Errors

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
#define SIMT_ERROR(name, value, text) \
  case name:                          \
    return #name;
#include "simt/errors.inc"
#undef SIMT_ERROR
  }
  return "unrecognized error code";
}

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
#define SIMT_ERROR(name, value, text) \
  case name:                          \
    return text;
#include "simt/errors.inc"
#undef SIMT_ERROR
  }
  return "unrecognized error code";
}

// A failed device's error stays.
cudaError_t cudaPeekAtLastError() {
  auto& runtime = Runtime::Get();
  const std::lock_guard<std::mutex> lock(runtime.mutex);
  ++runtime.calls;
  if (!runtime.devices.empty() && runtime.devices[current_device].error != cudaSuccess) {
    return runtime.devices[current_device].error;
  }
  return last_error;
}

cudaError_t cudaGetLastError() {
  const cudaError_t error = cudaPeekAtLastError();
  last_error = cudaSuccess;
  return error;
}

// ---- Devices

cudaError_t cudaGetDeviceCount(int* count) {
  SIMT_ENTER("cudaGetDeviceCount", cudaErrorNoDevice, false);
  if (!count) return SetLastError(cudaErrorInvalidValue);
  *count = static_cast<int>(Runtime::Get().devices.size());
  return *count == 0 ? SetLastError(cudaErrorNoDevice) : cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  SIMT_ENTER("cudaSetDevice", cudaErrorDevicesUnavailable, false);
  const cudaError_t error = CheckDevice(device);
  if (error == cudaSuccess) current_device = device;
  return error;
}

cudaError_t cudaGetDevice(int* device) {
  SIMT_ENTER("cudaGetDevice", cudaErrorInitializationError, false);
  if (!device) return SetLastError(cudaErrorInvalidValue);
  if (Runtime::Get().devices.empty()) return SetLastError(cudaErrorNoDevice);
  *device = current_device;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  SIMT_ENTER("cudaGetDeviceProperties", cudaErrorInvalidDevice, false);
  if (!properties) return SetLastError(cudaErrorInvalidValue);
  const cudaError_t error = CheckDevice(device);
  if (error != cudaSuccess) return error;
  const Settings settings = GetSettings();
  const auto attribute = [&](cudaDeviceAttr which) {
    bool known = false;
    return Attribute(settings, which, device, known);
  };
  *properties = {};
  std::snprintf(properties->name, sizeof(properties->name), "dim0 emulated device");
  properties->uuid.bytes[0] = static_cast<char>(device + 1);
  properties->totalGlobalMem = settings.memory_bytes;
  properties->sharedMemPerBlock = attribute(cudaDevAttrMaxSharedMemoryPerBlock);
  properties->regsPerBlock = attribute(cudaDevAttrMaxRegistersPerBlock);
  properties->warpSize = attribute(cudaDevAttrWarpSize);
  properties->maxThreadsPerBlock = attribute(cudaDevAttrMaxThreadsPerBlock);
  properties->maxThreadsDim[0] = attribute(cudaDevAttrMaxBlockDimX);
  properties->maxThreadsDim[1] = attribute(cudaDevAttrMaxBlockDimY);
  properties->maxThreadsDim[2] = attribute(cudaDevAttrMaxBlockDimZ);
  properties->maxGridSize[0] = attribute(cudaDevAttrMaxGridDimX);
  properties->maxGridSize[1] = attribute(cudaDevAttrMaxGridDimY);
  properties->maxGridSize[2] = attribute(cudaDevAttrMaxGridDimZ);
  properties->major = attribute(cudaDevAttrComputeCapabilityMajor);
  properties->minor = attribute(cudaDevAttrComputeCapabilityMinor);
  properties->multiProcessorCount = attribute(cudaDevAttrMultiProcessorCount);
  properties->concurrentKernels = attribute(cudaDevAttrConcurrentKernels);
  properties->pciBusID = attribute(cudaDevAttrPciBusId);
  properties->asyncEngineCount = attribute(cudaDevAttrAsyncEngineCount);
  properties->unifiedAddressing = attribute(cudaDevAttrUnifiedAddressing);
  properties->memoryBusWidth = attribute(cudaDevAttrGlobalMemoryBusWidth);
  properties->l2CacheSize = attribute(cudaDevAttrL2CacheSize);
  properties->maxThreadsPerMultiProcessor = attribute(cudaDevAttrMaxThreadsPerMultiProcessor);
  properties->streamPrioritiesSupported = attribute(cudaDevAttrStreamPrioritiesSupported);
  properties->sharedMemPerMultiprocessor = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  properties->regsPerMultiprocessor = attribute(cudaDevAttrMaxRegistersPerMultiprocessor);
  properties->sharedMemPerBlockOptin = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  properties->maxBlocksPerMultiProcessor = attribute(cudaDevAttrMaxBlocksPerMultiprocessor);
  properties->reservedSharedMemPerBlock = attribute(cudaDevAttrReservedSharedMemoryPerBlock);
  properties->memoryPoolsSupported = attribute(cudaDevAttrMemoryPoolsSupported);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  SIMT_ENTER("cudaDeviceGetAttribute", cudaErrorInvalidDevice, false);
  if (!value) return SetLastError(cudaErrorInvalidValue);
  const cudaError_t error = CheckDevice(device);
  if (error != cudaSuccess) return error;
  bool known = false;
  const int found = Attribute(GetSettings(), attribute, device, known);
  if (!known) return SetLastError(cudaErrorInvalidValue);
  *value = found;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* id, int length, int device) {
  SIMT_ENTER("cudaDeviceGetPCIBusId", cudaErrorInvalidDevice, false);
  if (!id || length < 13) return SetLastError(cudaErrorInvalidValue);
  const cudaError_t error = CheckDevice(device);
  if (error != cudaSuccess) return error;
  std::snprintf(id, length, "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
  SIMT_ENTER("cudaDriverGetVersion", cudaErrorInitializationError, false);
  if (!version) return SetLastError(cudaErrorInvalidValue);
  // Without a device there is no driver.
  *version = Runtime::Get().devices.empty() ? 0 : kDriverVersion;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  SIMT_ENTER("cudaRuntimeGetVersion", cudaErrorInitializationError, false);
  if (!version) return SetLastError(cudaErrorInvalidValue);
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  SIMT_ENTER("cudaDeviceSynchronize", cudaErrorLaunchFailure, true);
  WaitForDevice(current_device);
  return AfterWaiting(current_device, /*thorough=*/true);
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  SIMT_ENTER("cudaDeviceCanAccessPeer", cudaErrorInvalidDevice, false);
  if (!can) return SetLastError(cudaErrorInvalidValue);
  cudaError_t error = CheckDevice(device);
  if (error == cudaSuccess) error = CheckDevice(peer);
  if (error == cudaSuccess) *can = device != peer;
  return error;
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
  SIMT_ENTER("cudaDeviceEnablePeerAccess", cudaErrorPeerAccessUnsupported, true);
  if (flags != 0) return SetLastError(cudaErrorInvalidValue);
  const cudaError_t error = CheckDevice(peer);
  if (error != cudaSuccess) return error;
  if (peer == current_device) return SetLastError(cudaErrorInvalidDevice);
  auto& runtime = Runtime::Get();
  const std::lock_guard<std::mutex> lock(runtime.mutex);
  if (!runtime.devices[current_device].peers.insert(peer).second) {
    return SetLastError(cudaErrorPeerAccessAlreadyEnabled);
  }
  return cudaSuccess;
}

// ---- Memory

namespace {

// The operations that read or write memory find it unusable only when they run.
cudaError_t CheckRange(const char* name, const void* start, size_t bytes) {
  const auto allocation = FindAllocation(start);
  const char* problem = nullptr;
  if (!allocation) {
    problem = IsFreed(start) ? "memory that has been freed" : "no memory";
  } else if (!allocation->accessible) {
    problem = "memory that its stream has not yet allocated";
  }
  if (!problem) return cudaSuccess;
  std::fprintf(stderr, "simt: %s: %zu bytes at %p: %s: %s\n", name, bytes, start, problem,
               DescribeAddress(start).c_str());
  return cudaErrorIllegalAddress;
}

// What lies at an address, as a copy sees it. False: the bytes are not all in one allocation.
bool Classify(const void* start, size_t bytes, cudaMemoryType* type) {
  const auto allocation = FindAllocation(start);
  if (!allocation) {
    *type = cudaMemoryTypeUnregistered;
    // A pointer into emulated memory that is no longer allocated is not host memory.
    return DescribeAddress(start).empty();
  }
  *type = allocation->kind == MemoryKind::kDevice ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
  const size_t offset = reinterpret_cast<uintptr_t>(start) - allocation->start;
  return bytes <= allocation->bytes - offset && !allocation->being_freed;
}

cudaError_t AllocateDevice(void** pointer, size_t bytes, bool stream_ordered) {
  if (!pointer) return SetLastError(cudaErrorInvalidValue);
  *pointer = nullptr;
  if (bytes == 0) return cudaSuccess;
  const int64_t used = DeviceBytesInUse(current_device);
  const int64_t total = GetSettings().memory_bytes;
  if (bytes > static_cast<size_t>(std::max<int64_t>(total - used, 0))) {
    return SetLastError(cudaErrorMemoryAllocation);
  }
  *pointer = Allocate(MemoryKind::kDevice, current_device, bytes, stream_ordered);
  if (!*pointer) return SetLastError(cudaErrorMemoryAllocation);
  Change([&] {
    int64_t& most = Runtime::Get().devices[current_device].most_used;
    most = std::max(most, used + static_cast<int64_t>(bytes));
  });
  return cudaSuccess;
}

cudaError_t TellDamage(int device, const std::string& damage) {
  if (damage.empty()) return cudaSuccess;
  std::fprintf(stderr, "simt: device %d: %s\n", device, damage.c_str());
  FailDevice(device, cudaErrorIllegalAddress);
  return SetLastError(cudaErrorIllegalAddress);
}

cudaError_t Copy(const char* name, void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                 const std::shared_ptr<StreamState>& stream, bool blocking) {
  if (bytes == 0) return cudaSuccess;
  if (!to || !from) return SetLastError(cudaErrorInvalidValue);
  cudaMemoryType to_type, from_type;
  if (!Classify(to, bytes, &to_type) || !Classify(from, bytes, &from_type)) {
    std::fprintf(stderr, "simt: %s: %zu bytes from %p (%s) to %p (%s)\n", name, bytes, from,
                 DescribeAddress(from).c_str(), to, DescribeAddress(to).c_str());
    return SetLastError(cudaErrorInvalidValue);
  }
  const bool to_device = to_type == cudaMemoryTypeDevice;
  const bool from_device = from_type == cudaMemoryTypeDevice;
  if (kind < cudaMemcpyHostToHost || kind > cudaMemcpyDefault) {
    return SetLastError(cudaErrorInvalidMemcpyDirection);
  }
  if (kind != cudaMemcpyDefault &&
      (to_device != (kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice) ||
       from_device != (kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice))) {
    return SetLastError(cudaErrorInvalidValue);
  }
  StreamState::Operation operation;
  operation.name = name;
  const auto check = [name = std::string(name), bytes](const void* start, cudaMemoryType type) {
    return type == cudaMemoryTypeUnregistered ? cudaSuccess
                                              : CheckRange(name.c_str(), start, bytes);
  };
  // Pageable memory is read before the call returns.
  std::shared_ptr<char[]> staged;
  if (from_type == cudaMemoryTypeUnregistered) {
    staged.reset(new char[bytes]);
    std::memcpy(staged.get(), from, bytes);
  }
  operation.run = [=, name = std::string(name)] {
    return RunOperation(name, [&] {
      cudaError_t error = check(to, to_type);
      if (error == cudaSuccess && !staged) error = check(from, from_type);
      if (error == cudaSuccess) std::memmove(to, staged ? staged.get() : from, bytes);
      return error;
    });
  };
  Enqueue(stream, std::move(operation));
  // Pageable memory is written before the call returns.
  if (blocking || to_type == cudaMemoryTypeUnregistered) {
    WaitForStream(stream);
    return AfterWaiting(stream->device, false);
  }
  return cudaSuccess;
}

cudaError_t Fill(const char* name, void* to, int value, size_t bytes,
                 const std::shared_ptr<StreamState>& stream) {
  if (bytes == 0) return cudaSuccess;
  cudaMemoryType type;
  if (!to || !Classify(to, bytes, &type) || type == cudaMemoryTypeUnregistered) {
    return SetLastError(cudaErrorInvalidValue);
  }
  StreamState::Operation operation;
  operation.name = name;
  operation.run = [=, name = std::string(name)] {
    return RunOperation(name, [&] {
      const cudaError_t error = CheckRange(name.c_str(), to, bytes);
      if (error == cudaSuccess) std::memset(to, value, bytes);
      return error;
    });
  };
  Enqueue(stream, std::move(operation));
  return cudaSuccess;
}

}  // namespace

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  SIMT_ENTER("cudaMemGetInfo", cudaErrorLaunchFailure, true);
  if (!free || !total) return SetLastError(cudaErrorInvalidValue);
  const int64_t all = GetSettings().memory_bytes;
  *total = all;
  *free = std::max<int64_t>(all - DeviceBytesInUse(current_device), 0);
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  SIMT_ENTER("cudaMalloc", cudaErrorMemoryAllocation, true);
  Change([] { ++Runtime::Get().allocations; });
  const cudaError_t error = AllocateDevice(pointer, bytes, false);
  if (error == cudaSuccess && *pointer) MakeAccessible(*pointer);
  return error;
}

cudaError_t cudaFree(void* pointer) {
  SIMT_ENTER("cudaFree", cudaErrorLaunchFailure, true);
  if (!pointer) return cudaSuccess;
  const auto allocation = FindAllocation(pointer);
  if (!allocation || allocation->kind != MemoryKind::kDevice || !MarkBeingFreed(pointer)) {
    return SetLastError(cudaErrorInvalidValue);
  }
  // As documented, what comes from cudaMallocAsync is taken to be no longer in use. Else the device
  // is waited for.
  if (!allocation->stream_ordered) WaitForDevice(allocation->device);
  return TellDamage(allocation->device, Free(pointer));
}

cudaError_t cudaMallocAsync(void** pointer, size_t bytes, cudaStream_t stream) {
  SIMT_ENTER("cudaMallocAsync", cudaErrorMemoryAllocation, true);
  const auto state = FindStream(stream);
  if (!state || state->device != current_device) {
    return SetLastError(cudaErrorInvalidResourceHandle);
  }
  const cudaError_t error = AllocateDevice(pointer, bytes, true);
  if (error != cudaSuccess || !*pointer) return error;
  StreamState::Operation operation;
  operation.name = "cudaMallocAsync";
  operation.run = [start = *pointer] {
    MakeAccessible(start);
    return cudaSuccess;
  };
  Enqueue(state, std::move(operation));
  return cudaSuccess;
}

cudaError_t cudaFreeAsync(void* pointer, cudaStream_t stream) {
  SIMT_ENTER("cudaFreeAsync", cudaErrorLaunchFailure, true);
  const auto state = FindStream(stream);
  if (!state) return SetLastError(cudaErrorInvalidResourceHandle);
  if (!pointer) return cudaSuccess;
  const auto allocation = FindAllocation(pointer);
  if (!allocation || !allocation->stream_ordered || !MarkBeingFreed(pointer)) {
    return SetLastError(cudaErrorInvalidValue);
  }
  StreamState::Operation operation;
  operation.name = "cudaFreeAsync";
  operation.run = [pointer] {
    const std::string damage = Free(pointer);
    if (damage.empty()) return cudaSuccess;
    std::fprintf(stderr, "simt: cudaFreeAsync: %s\n", damage.c_str());
    return cudaErrorIllegalAddress;
  };
  Enqueue(state, std::move(operation));
  return cudaSuccess;
}

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int device) {
  SIMT_ENTER("cudaDeviceGetDefaultMemPool", cudaErrorNotSupported, true);
  if (!pool) return SetLastError(cudaErrorInvalidValue);
  const cudaError_t error = CheckDevice(device);
  // A handle is the device's number, from 1 on.
  if (error == cudaSuccess) *pool = reinterpret_cast<cudaMemPool_t>(uintptr_t(device + 1));
  return error;
}

namespace {
int PoolDevice(cudaMemPool_t pool) {
  const auto device = static_cast<int64_t>(reinterpret_cast<uintptr_t>(pool)) - 1;
  return device >= 0 && device < static_cast<int64_t>(Runtime::Get().devices.size())
             ? static_cast<int>(device)
             : -1;
}
}  // namespace

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void* value) {
  SIMT_ENTER("cudaMemPoolSetAttribute", cudaErrorInvalidValue, true);
  const int device = PoolDevice(pool);
  if (device < 0 || !value) return SetLastError(cudaErrorInvalidValue);
  auto& runtime = Runtime::Get();
  const std::lock_guard<std::mutex> lock(runtime.mutex);
  switch (attribute) {
    case cudaMemPoolReuseFollowEventDependencies:
    case cudaMemPoolReuseAllowOpportunistic:
    case cudaMemPoolReuseAllowInternalDependencies:
      return cudaSuccess;  // nothing is reused
    case cudaMemPoolAttrReleaseThreshold:
      runtime.devices[device].release_threshold = *static_cast<uint64_t*>(value);
      return cudaSuccess;
    case cudaMemPoolAttrReservedMemHigh:
    case cudaMemPoolAttrUsedMemHigh:
      if (*static_cast<uint64_t*>(value) != 0) return SetLastError(cudaErrorInvalidValue);
      runtime.devices[device].most_used = DeviceBytesInUse(device);
      return cudaSuccess;
    default:
      return SetLastError(cudaErrorInvalidValue);
  }
}

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void* value) {
  SIMT_ENTER("cudaMemPoolGetAttribute", cudaErrorInvalidValue, true);
  const int device = PoolDevice(pool);
  if (device < 0 || !value) return SetLastError(cudaErrorInvalidValue);
  auto& runtime = Runtime::Get();
  const std::lock_guard<std::mutex> lock(runtime.mutex);
  switch (attribute) {
    case cudaMemPoolReuseFollowEventDependencies:
    case cudaMemPoolReuseAllowOpportunistic:
    case cudaMemPoolReuseAllowInternalDependencies:
      *static_cast<int*>(value) = 1;
      return cudaSuccess;
    case cudaMemPoolAttrReleaseThreshold:
      *static_cast<uint64_t*>(value) = runtime.devices[device].release_threshold;
      return cudaSuccess;
    case cudaMemPoolAttrReservedMemCurrent:
    case cudaMemPoolAttrUsedMemCurrent:
      *static_cast<uint64_t*>(value) = DeviceBytesInUse(device);
      return cudaSuccess;
    case cudaMemPoolAttrReservedMemHigh:
    case cudaMemPoolAttrUsedMemHigh:
      *static_cast<uint64_t*>(value) = runtime.devices[device].most_used;
      return cudaSuccess;
  }
  return SetLastError(cudaErrorInvalidValue);
}

cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t /*bytes*/) {
  SIMT_ENTER("cudaMemPoolTrimTo", cudaErrorLaunchFailure, true);
  return PoolDevice(pool) < 0 ? SetLastError(cudaErrorInvalidValue) : cudaSuccess;
}

cudaError_t cudaMallocHost(void** pointer, size_t bytes) {
  return cudaHostAlloc(pointer, bytes, 0);
}

cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned flags) {
  SIMT_ENTER("cudaHostAlloc", cudaErrorMemoryAllocation, true);
  Change([] { ++Runtime::Get().allocations; });
  if (!pointer || flags > 7) return SetLastError(cudaErrorInvalidValue);
  *pointer = nullptr;
  if (bytes == 0) return cudaSuccess;
  *pointer = Allocate(MemoryKind::kPinned, current_device, bytes, false);
  if (!*pointer) return SetLastError(cudaErrorMemoryAllocation);
  MakeAccessible(*pointer);
  return cudaSuccess;
}

// Waits for nothing: a copy that still uses the memory is reported when it runs.
cudaError_t cudaFreeHost(void* pointer) {
  SIMT_ENTER("cudaFreeHost", cudaErrorLaunchFailure, true);
  if (!pointer) return cudaSuccess;
  const auto allocation = FindAllocation(pointer);
  if (!allocation || allocation->kind != MemoryKind::kPinned || !MarkBeingFreed(pointer)) {
    return SetLastError(cudaErrorInvalidValue);
  }
  return TellDamage(allocation->device, Free(pointer));
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  SIMT_ENTER("cudaPointerGetAttributes", cudaErrorInvalidValue, true);
  if (!attributes) return SetLastError(cudaErrorInvalidValue);
  const auto allocation = FindAllocation(pointer);
  *attributes = {};
  auto* plain = const_cast<void*>(pointer);
  if (!allocation) {
    attributes->type = cudaMemoryTypeUnregistered;
    attributes->device = -2;
    attributes->hostPointer = plain;
  } else {
    const bool device = allocation->kind == MemoryKind::kDevice;
    attributes->type = device ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
    attributes->device = allocation->device;
    attributes->devicePointer = plain;
    attributes->hostPointer = device ? nullptr : plain;
  }
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  SIMT_ENTER("cudaMemcpy", cudaErrorLaunchFailure, true);
  return Copy("cudaMemcpy", to, from, bytes, kind, FindStream(nullptr), true);
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  SIMT_ENTER("cudaMemcpyAsync", cudaErrorLaunchFailure, true);
  const auto state = FindStream(stream);
  if (!state) return SetLastError(cudaErrorInvalidResourceHandle);
  return Copy("cudaMemcpyAsync", to, from, bytes, kind, state, false);
}

cudaError_t cudaMemcpyPeerAsync(void* to, int to_device, const void* from, int from_device,
                                size_t bytes, cudaStream_t stream) {
  SIMT_ENTER("cudaMemcpyPeerAsync", cudaErrorLaunchFailure, true);
  const auto state = FindStream(stream);
  if (!state) return SetLastError(cudaErrorInvalidResourceHandle);
  if (bytes > 0) {
    const auto to_memory = FindAllocation(to), from_memory = FindAllocation(from);
    if (!to_memory || !from_memory || to_memory->device != to_device ||
        from_memory->device != from_device) {
      return SetLastError(cudaErrorInvalidValue);
    }
  }
  return Copy("cudaMemcpyPeerAsync", to, from, bytes, cudaMemcpyDeviceToDevice, state, false);
}

cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  SIMT_ENTER("cudaMemset", cudaErrorLaunchFailure, true);
  return Fill("cudaMemset", to, value, bytes, FindStream(nullptr));
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  SIMT_ENTER("cudaMemsetAsync", cudaErrorLaunchFailure, true);
  const auto state = FindStream(stream);
  if (!state) return SetLastError(cudaErrorInvalidResourceHandle);
  return Fill("cudaMemsetAsync", to, value, bytes, state);
}

// ---- Streams

namespace {
constexpr int kLeastPriority = 0, kGreatestPriority = -5;
}  // namespace

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  SIMT_ENTER("cudaStreamCreateWithPriority", cudaErrorMemoryAllocation, true);
  if (!stream || flags > cudaStreamNonBlocking) return SetLastError(cudaErrorInvalidValue);
  auto state = std::make_shared<StreamState>();
  state->device = current_device;
  state->flags = flags;
  state->priority = std::clamp(priority, kGreatestPriority, kLeastPriority);
  Change([&] {
    auto& runtime = Runtime::Get();
    runtime.streams.push_back(state);
    *stream = reinterpret_cast<cudaStream_t>(++runtime.next_handle << 4);
    runtime.stream_handles[*stream] = state;
  });
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithPriority(stream, cudaStreamDefault, 0);
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  SIMT_ENTER("cudaStreamGetPriority", cudaErrorLaunchFailure, true);
  const auto state = FindStream(stream);
  if (!state) return SetLastError(cudaErrorInvalidResourceHandle);
  if (!priority) return SetLastError(cudaErrorInvalidValue);
  *priority = state->priority;
  return cudaSuccess;
}

cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned* flags) {
  SIMT_ENTER("cudaStreamGetFlags", cudaErrorLaunchFailure, true);
  const auto state = FindStream(stream);
  if (!state) return SetLastError(cudaErrorInvalidResourceHandle);
  if (!flags) return SetLastError(cudaErrorInvalidValue);
  *flags = state->flags;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  SIMT_ENTER("cudaDeviceGetStreamPriorityRange", cudaErrorInitializationError, true);
  if (least) *least = kLeastPriority;
  if (greatest) *greatest = kGreatestPriority;
  return cudaSuccess;
}

// Work that is enqueued still runs.
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  SIMT_ENTER("cudaStreamDestroy", cudaErrorLaunchFailure, false);
  const auto state = FindStream(stream);
  if (!stream || !state) return SetLastError(cudaErrorInvalidResourceHandle);
  Change([&] {
    if (state->unlaunched > 0) {  // nobody could be told later
      std::fprintf(stderr, "simt: a stream is destroyed on which NCCL has yet to launch\n");
      std::abort();
    }
    auto& runtime = Runtime::Get();
    runtime.stream_handles.erase(stream);
    state->destroyed = true;
    if (state->queue.empty()) std::erase(runtime.streams, state);
  });
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  SIMT_ENTER("cudaStreamSynchronize", cudaErrorLaunchFailure, true);
  const auto state = FindStream(stream);
  if (!state) return SetLastError(cudaErrorInvalidResourceHandle);
  WaitForStream(state);
  return AfterWaiting(state->device, false);
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  SIMT_ENTER("cudaStreamQuery", cudaErrorLaunchFailure, true);
  const auto state = FindStream(stream);
  if (!state) return SetLastError(cudaErrorInvalidResourceHandle);
  const cudaError_t error = DeviceError(state->device);
  if (error != cudaSuccess) return SetLastError(error);
  bool done = false;
  Change([&] { done = state->completed == state->enqueued; });
  if (done) return cudaSuccess;
  Poll();
  return cudaErrorNotReady;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  SIMT_ENTER("cudaStreamWaitEvent", cudaErrorLaunchFailure, true);
  const auto state = FindStream(stream);
  const auto event_state = FindEvent(event);
  if (!state || !event_state) return SetLastError(cudaErrorInvalidResourceHandle);
  if (flags != 0) return SetLastError(cudaErrorInvalidValue);
  std::shared_ptr<const RecordedPoint> point;
  Change([&] { point = event_state->last; });
  if (point == nullptr) return cudaSuccess;  // there is nothing to wait for
  StreamState::Operation operation;
  operation.name = "cudaStreamWaitEvent";
  operation.ready = [point] { return point->passed; };
  operation.run = [] { return cudaSuccess; };
  Enqueue(state, std::move(operation));
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  SIMT_ENTER("cudaLaunchHostFunc", cudaErrorLaunchFailure, true);
  const auto state = FindStream(stream);
  if (!state) return SetLastError(cudaErrorInvalidResourceHandle);
  if (!function) return SetLastError(cudaErrorInvalidValue);
  StreamState::Operation operation;
  operation.name = "cudaLaunchHostFunc";
  operation.run = [function, data] {
    in_host_function = true;
    function(data);
    in_host_function = false;
    return cudaSuccess;
  };
  Enqueue(state, std::move(operation));
  return cudaSuccess;
}

// ---- Events

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  SIMT_ENTER("cudaEventCreateWithFlags", cudaErrorMemoryAllocation, true);
  if (!event || flags > (cudaEventBlockingSync | cudaEventDisableTiming)) {
    return SetLastError(cudaErrorInvalidValue);
  }
  auto state = std::make_shared<EventState>();
  state->device = current_device;
  state->flags = flags;
  Change([&] {
    auto& runtime = Runtime::Get();
    *event = reinterpret_cast<cudaEvent_t>(++runtime.next_handle << 4);
    runtime.events[*event] = state;
  });
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return cudaEventCreateWithFlags(event, cudaEventDefault);
}

// What waits for it goes on waiting for what it was recorded at.
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  SIMT_ENTER("cudaEventDestroy", cudaErrorLaunchFailure, false);
  bool found = false;
  Change([&] { found = Runtime::Get().events.erase(event) > 0; });
  return found ? cudaSuccess : SetLastError(cudaErrorInvalidResourceHandle);
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  SIMT_ENTER("cudaEventRecord", cudaErrorLaunchFailure, true);
  const auto state = FindStream(stream);
  const auto event_state = FindEvent(event);
  if (!state || !event_state || state->device != event_state->device) {
    return SetLastError(cudaErrorInvalidResourceHandle);
  }
  const auto point = std::make_shared<RecordedPoint>();
  Change([&] { event_state->last = point; });
  StreamState::Operation operation;
  operation.name = "cudaEventRecord";
  operation.always = true;
  operation.run = [point] {
    const auto now = Clock::now();
    Change([&] {
      point->passed = true;
      point->time = now;
    });
    return cudaSuccess;
  };
  Enqueue(state, std::move(operation));
  return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  SIMT_ENTER("cudaEventSynchronize", cudaErrorLaunchFailure, true);
  const auto state = FindEvent(event);
  if (!state) return SetLastError(cudaErrorInvalidResourceHandle);
  std::shared_ptr<const RecordedPoint> point;
  Change([&] { point = state->last; });
  WaitUntil([&] { return point == nullptr || point->passed; });
  return AfterWaiting(state->device, false);
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  SIMT_ENTER("cudaEventQuery", cudaErrorLaunchFailure, true);
  const auto state = FindEvent(event);
  if (!state) return SetLastError(cudaErrorInvalidResourceHandle);
  const cudaError_t error = DeviceError(state->device);
  if (error != cudaSuccess) return SetLastError(error);
  bool passed = false;
  Change([&] { passed = state->last == nullptr || state->last->passed; });
  if (passed) return cudaSuccess;
  Poll();
  return cudaErrorNotReady;
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  SIMT_ENTER("cudaEventElapsedTime", cudaErrorLaunchFailure, true);
  const auto from = FindEvent(start), to = FindEvent(end);
  if (!from || !to || from->device != to->device ||
      ((from->flags | to->flags) & cudaEventDisableTiming)) {
    return SetLastError(cudaErrorInvalidResourceHandle);
  }
  if (!milliseconds) return SetLastError(cudaErrorInvalidValue);
  cudaError_t result = cudaSuccess;
  Change([&] {
    if (from->last == nullptr || to->last == nullptr) {
      result = cudaErrorInvalidResourceHandle;
    } else if (!from->last->passed || !to->last->passed) {
      result = cudaErrorNotReady;
    } else {
      *milliseconds =
          std::chrono::duration<float, std::milli>(to->last->time - from->last->time).count();
    }
  });
  return SetLastError(result);
}
