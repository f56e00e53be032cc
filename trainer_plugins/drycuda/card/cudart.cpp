// libcudart: the runtime that torch's CUDA build calls. Its counters and its state are in core.cpp.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>

#include "core.h"

using cuda::Result;
using Handle = void*;

namespace {

thread_local Result last_error = cuda::kSuccess;

Result say(Result result) {
  if (result != cuda::kSuccess && result != cuda::kNotReady) last_error = result;
  return result;
}

Result only_counted(const char* name) {
  dry::count(name);
  return cuda::kSuccess;
}

// An object of which only the address matters: a graph, a module, a pool.
Handle new_thing() { return new char; }

Result properties(cuda::DeviceProperties* found, int device) {
  if (device < 0 || device >= dry::num_devices()) return say(cuda::kInvalidDevice);
  const dry::Kind& kind = dry::kind();
  std::memset(found, 0, sizeof *found);
  std::snprintf(found->name, sizeof found->name, "%s", kind.name.c_str());
  std::memcpy(found->uuid, dry::uuid_bytes(device).data(), sizeof found->uuid);
  found->total_bytes = dry::total_bytes(device);
  found->major = kind.major;
  found->minor = kind.minor;
  found->num_multiprocessors = kind.multiprocessors;
  found->l2_bytes = kind.l2_bytes;
  found->shared_per_block = 48 << 10;
  found->shared_per_block_optin = kind.shared_optin_bytes;
  found->shared_per_multiprocessor = kind.shared_bytes;
  found->reserved_shared_per_block = 1 << 10;
  found->registers_per_block = found->registers_per_multiprocessor = 65536;
  found->warp_size = 32;
  found->memory_pitch = 2147483647;
  found->max_threads_per_block = found->max_block[0] = found->max_block[1] = 1024;
  found->max_block[2] = 64;
  found->max_grid[0] = 2147483647;
  found->max_grid[1] = found->max_grid[2] = 65535;
  found->max_threads_per_multiprocessor = kind.max_threads;
  found->max_blocks_per_multiprocessor = kind.max_threads == 1024 ? 16 : kind.max_threads == 1536 ? 24 : 32;
  found->const_bytes = 65536;
  found->texture_alignment = 512;
  found->texture_pitch_alignment = 32;
  found->can_map_host = found->concurrent_kernels = found->unified_addressing = 1;
  found->managed_memory = found->concurrent_managed = found->preemption = found->cooperative_launch = 1;
  found->stream_priorities = found->global_l1 = found->local_l1 = found->memory_pools = found->host_register = 1;
  found->num_copy_engines = 3;
  found->memory_bus_bits = 5120;
  found->pci_bus = dry::pci_bus(device);
  found->cluster_launch = kind.major >= 9;
  return cuda::kSuccess;
}

}  // namespace

// ---- devices --------------------------------------------------------------------------------------------------------

EXPORT Result cudaGetDeviceCount(int* count) {
  *count = dry::num_devices();
  return *count ? cuda::kSuccess : say(cuda::kNoDevice);
}
EXPORT Result cudaGetDevice(int* device) {
  *device = dry::current_device();
  return cuda::kSuccess;
}
EXPORT Result cudaSetDevice(int device) { return dry::select_device(device) ? cuda::kSuccess : say(cuda::kInvalidDevice); }
EXPORT Result cudaInitDevice(int device, unsigned, unsigned) {
  if (device < 0 || device >= dry::num_devices()) return say(cuda::kInvalidDevice);
  dry::enter_device(device);
  return cuda::kSuccess;
}
EXPORT Result cudaGetDeviceProperties(cuda::DeviceProperties* found, int device) { return properties(found, device); }
EXPORT Result cudaGetDeviceProperties_v2(cuda::DeviceProperties* found, int device) { return properties(found, device); }
EXPORT Result cudaDeviceGetAttribute(int* value, int attribute, int device) {
  cuda::DeviceProperties of;
  if (const Result result = properties(&of, device)) return result;
  switch (attribute) {
    case cuda::kMaxThreadsPerBlock: *value = of.max_threads_per_block; break;
    case cuda::kMaxBlockDimX: *value = of.max_block[0]; break;
    case cuda::kMaxBlockDimY: *value = of.max_block[1]; break;
    case cuda::kMaxBlockDimZ: *value = of.max_block[2]; break;
    case cuda::kMaxGridDimX: *value = of.max_grid[0]; break;
    case cuda::kMaxGridDimY: *value = of.max_grid[1]; break;
    case cuda::kMaxGridDimZ: *value = of.max_grid[2]; break;
    case cuda::kMaxSharedMemoryPerBlock: *value = of.shared_per_block; break;
    case cuda::kTotalConstantMemory: *value = of.const_bytes; break;
    case cuda::kWarpSize: *value = of.warp_size; break;
    case cuda::kMaxPitch: *value = of.memory_pitch; break;
    case cuda::kMaxRegistersPerBlock: *value = of.registers_per_block; break;
    case cuda::kClockRate: *value = 1980000; break;
    case cuda::kTextureAlignment: *value = of.texture_alignment; break;
    case cuda::kMultiProcessorCount: *value = of.num_multiprocessors; break;
    case cuda::kPciBusId: *value = of.pci_bus; break;
    case cuda::kMemoryClockRate: *value = 2619000; break;
    case cuda::kGlobalMemoryBusWidth: *value = of.memory_bus_bits; break;
    case cuda::kL2CacheSize: *value = of.l2_bytes; break;
    case cuda::kMaxThreadsPerMultiProcessor: *value = of.max_threads_per_multiprocessor; break;
    case cuda::kAsyncEngineCount: *value = of.num_copy_engines; break;
    case cuda::kComputeCapabilityMajor: *value = of.major; break;
    case cuda::kComputeCapabilityMinor: *value = of.minor; break;
    case cuda::kMaxSharedMemoryPerMultiprocessor: *value = of.shared_per_multiprocessor; break;
    case cuda::kMaxRegistersPerMultiprocessor: *value = of.registers_per_multiprocessor; break;
    case cuda::kMaxSharedMemoryPerBlockOptin: *value = of.shared_per_block_optin; break;
    case cuda::kMaxBlocksPerMultiprocessor: *value = of.max_blocks_per_multiprocessor; break;
    case cuda::kReservedSharedMemoryPerBlock: *value = of.reserved_shared_per_block; break;
    case cuda::kClusterLaunch: *value = of.cluster_launch; break;
    case cuda::kCanMapHostMemory:
    case cuda::kConcurrentKernels:
    case cuda::kUnifiedAddressing:
    case cuda::kStreamPrioritiesSupported:
    case cuda::kManagedMemory:
    case cuda::kConcurrentManagedAccess:
    case cuda::kComputePreemptionSupported:
    case cuda::kCooperativeLaunch:
    case cuda::kHostRegisterSupported:
    case cuda::kVirtualMemoryManagementSupported:
    case cuda::kMemoryPoolsSupported: *value = 1; break;
    default: *value = 0;  // newer or rarer features are missing: fabric handles, multicast, GPU direct
  }
  return cuda::kSuccess;
}
EXPORT Result cudaDeviceGetPCIBusId(char* text, int length, int device) {
  std::snprintf(text, length, "0000:%02X:00.0", dry::pci_bus(device));
  return cuda::kSuccess;
}
EXPORT Result cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  *can = device != peer;
  return cuda::kSuccess;
}
EXPORT Result cudaDeviceEnablePeerAccess(int, unsigned) { return cuda::kSuccess; }
EXPORT Result cudaDeviceSynchronize() { return only_counted("cudaDeviceSynchronize"); }
EXPORT Result cudaDeviceReset() { return cuda::kSuccess; }
EXPORT Result cudaDeviceSetLimit(int, size_t) { return cuda::kSuccess; }
EXPORT Result cudaDriverGetVersion(int* version) {
  *version = dry::kind().driver;
  return cuda::kSuccess;
}
EXPORT Result cudaRuntimeGetVersion(int* version) {
  *version = CUDA_MAJOR * 1000;
  return cuda::kSuccess;
}
EXPORT Result cudaGetLastError() {
  const Result result = last_error;
  last_error = cuda::kSuccess;
  return result;
}
EXPORT Result cudaPeekAtLastError() { return last_error; }
EXPORT const char* cudaGetErrorString(Result result) {
  switch (result) {
    case cuda::kSuccess: return "no error";
    case cuda::kInvalidValue: return "invalid argument";
    case cuda::kOutOfMemory: return "out of memory";
    case cuda::kNoDevice: return "no CUDA-capable device is detected";
    case cuda::kInvalidDevice: return "invalid device ordinal";
    case cuda::kNotReady: return "device not ready";
    case cuda::kNotSupported: return "operation not supported";
    default: return "an error of the dry card";
  }
}
EXPORT const char* cudaGetErrorName(Result result) {
  switch (result) {
    case cuda::kSuccess: return "cudaSuccess";
    case cuda::kInvalidValue: return "cudaErrorInvalidValue";
    case cuda::kOutOfMemory: return "cudaErrorMemoryAllocation";
    case cuda::kNoDevice: return "cudaErrorNoDevice";
    case cuda::kInvalidDevice: return "cudaErrorInvalidDevice";
    case cuda::kNotReady: return "cudaErrorNotReady";
    case cuda::kNotSupported: return "cudaErrorNotSupported";
    default: return "cudaErrorUnknown";
  }
}

// ---- memory ---------------------------------------------------------------------------------------------------------

EXPORT Result cudaMalloc(void** address, size_t num_bytes) {
  dry::count("cudaMalloc");
  *address = dry::allocate(num_bytes, dry::current_device());
  return *address != nullptr ? cuda::kSuccess : say(cuda::kOutOfMemory);
}
EXPORT Result cudaFree(void* address) {
  if (address == nullptr) return cuda::kSuccess;
  dry::count("cudaFree");
  return dry::release(address) ? cuda::kSuccess : say(cuda::kInvalidValue);
}
EXPORT Result cudaMallocAsync(void** address, size_t num_bytes, Handle) { return cudaMalloc(address, num_bytes); }
EXPORT Result cudaFreeAsync(void* address, Handle) { return cudaFree(address); }
EXPORT Result cudaMallocPitch(void** address, size_t* pitch, size_t width, size_t height) {
  *pitch = (width + 511) / 512 * 512;
  return cudaMalloc(address, *pitch * height);
}
EXPORT Result cudaMallocManaged(void** address, size_t num_bytes, unsigned) {
  dry::count("bytes managed", num_bytes);
  // Pages of managed memory are where they are used; paged optimizers leave them on the host.
  *address = dry::pin(num_bytes);
  return *address != nullptr ? cuda::kSuccess : say(cuda::kOutOfMemory);
}
EXPORT Result cudaMemPrefetchAsync(const void*, size_t) { return only_counted("cudaMemPrefetchAsync"); }
EXPORT Result cudaMemAdvise(const void*, size_t) { return cuda::kSuccess; }
EXPORT Result cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  *free_bytes = dry::free_bytes(dry::current_device());
  *total_bytes = dry::total_bytes(dry::current_device());
  return cuda::kSuccess;
}
EXPORT Result cudaHostAlloc(void** address, size_t num_bytes, unsigned) {
  dry::count("cudaHostAlloc");
  dry::count("bytes pinned", num_bytes);
  *address = dry::pin(num_bytes);
  return *address != nullptr ? cuda::kSuccess : say(cuda::kOutOfMemory);
}
EXPORT Result cudaMallocHost(void** address, size_t num_bytes) { return cudaHostAlloc(address, num_bytes, 0); }
EXPORT Result cudaFreeHost(void* address) {
  dry::unpin(address);
  return cuda::kSuccess;
}
EXPORT Result cudaHostRegister(void*, size_t num_bytes, unsigned) {
  dry::count("bytes pinned", num_bytes);
  return cuda::kSuccess;
}
EXPORT Result cudaHostUnregister(void*) { return cuda::kSuccess; }
EXPORT Result cudaHostGetDevicePointer(void** device, void* host, unsigned) {
  *device = host;
  return cuda::kSuccess;
}
EXPORT Result cudaPointerGetAttributes(cuda::PointerAttributes* found, const void* address) {
  std::memset(found, 0, sizeof *found);
  found->device = dry::device_of(address);
  void* of = const_cast<void*>(address);
  if (found->device >= 0) {
    found->type = cuda::kDeviceMemory;
    found->device_pointer = of;
  } else if (dry::is_pinned(address)) {
    found->type = cuda::kHostMemory;
    found->device = dry::current_device();
    found->device_pointer = found->host_pointer = of;
  } else {
    found->type = cuda::kUnregistered;
    found->device = -2;  // cudaInvalidDeviceId
    found->host_pointer = of;
  }
  return cuda::kSuccess;
}

namespace {

Result copied(void* to, const void* from, size_t num_bytes) {
  dry::copy(to, from, num_bytes);
  return cuda::kSuccess;
}

}  // namespace

EXPORT Result cudaMemcpy(void* to, const void* from, size_t num_bytes, int) {
  dry::count("cudaMemcpy");
  return copied(to, from, num_bytes);
}
EXPORT Result cudaMemcpyAsync(void* to, const void* from, size_t num_bytes, int, Handle stream) {
  dry::count("cudaMemcpyAsync");
  if (dry::is_recording) {
    const bool is_upload = dry::device_of(to) >= 0 && dry::device_of(from) < 0;
    dry::note(!is_upload ? "copy" : dry::is_pinned(from) ? "upload" : "unpinned", stream, num_bytes);
  }
  return copied(to, from, num_bytes);
}
EXPORT Result cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t num_bytes, Handle) {
  dry::count("cudaMemcpyAsync");
  return copied(to, from, num_bytes);
}
EXPORT Result cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height, int, Handle) {
  dry::count("cudaMemcpyAsync");
  if (width * height <= dry::kind().largest_copy_bytes)
    for (size_t row = 0; row < height; row++)
      dry::copy(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width);
  return cuda::kSuccess;
}
EXPORT Result cudaMemset(void* to, int value, size_t num_bytes) {
  dry::fill(to, value, num_bytes);
  return cuda::kSuccess;
}
EXPORT Result cudaMemsetAsync(void* to, int value, size_t num_bytes, Handle) { return cudaMemset(to, value, num_bytes); }
// Variables of kernels are not there: nothing reads them.
EXPORT Result cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, int) { return cuda::kSuccess; }
EXPORT Result cudaGetSymbolAddress(void** address, const void*) {
  static char& nothing = *new char[1 << 16];
  *address = &nothing;
  return cuda::kSuccess;
}

// Pools of cudaMallocAsync. Each keeps nothing, so there is nothing to trim.
EXPORT Result cudaDeviceGetDefaultMemPool(Handle* pool, int) {
  static Handle the_pool = new_thing();
  *pool = the_pool;
  return cuda::kSuccess;
}
EXPORT Result cudaMemPoolGetAttribute(Handle, int, void* value) {
  *static_cast<uint64_t*>(value) = 0;
  return cuda::kSuccess;
}
EXPORT Result cudaMemPoolSetAttribute(Handle, int, void*) { return cuda::kSuccess; }
EXPORT Result cudaMemPoolSetAccess(Handle, const void*, size_t) { return cuda::kSuccess; }
EXPORT Result cudaMemPoolTrimTo(Handle, size_t) { return cuda::kSuccess; }

// Memory of another process: its addresses, of which the owner's card is already full.
EXPORT Result cudaIpcGetMemHandle(cuda::IpcHandle* handle, void* address) {
  void* start = nullptr;
  size_t num_bytes = 0;
  if (dry::device_of(address, &start, &num_bytes) < 0) return say(cuda::kInvalidValue);
  std::memset(handle, 0, sizeof *handle);
  std::memcpy(handle->bytes, &num_bytes, sizeof num_bytes);
  return cuda::kSuccess;
}
EXPORT Result cudaIpcOpenMemHandle(void** address, cuda::IpcHandle handle, unsigned) {
  size_t num_bytes = 0;
  std::memcpy(&num_bytes, handle.bytes, sizeof num_bytes);
  *address = dry::reserve_addresses(num_bytes);
  if (*address == nullptr) return say(cuda::kOutOfMemory);
  dry::place(*address, num_bytes, dry::current_device());
  return cuda::kSuccess;
}
EXPORT Result cudaIpcCloseMemHandle(void* address) {
  void* start = nullptr;
  size_t num_bytes = 0;
  if (dry::device_of(address, &start, &num_bytes) < 0) return say(cuda::kInvalidValue);
  dry::unplace(start);
  dry::drop_addresses(start, num_bytes);
  return cuda::kSuccess;
}
EXPORT Result cudaIpcGetEventHandle(cuda::IpcHandle* handle, Handle) {
  std::memset(handle, 0, sizeof *handle);
  return cuda::kSuccess;
}
EXPORT Result cudaIpcOpenEventHandle(Handle* event, cuda::IpcHandle) {
  *event = new dry::Event{0, dry::now_nanoseconds(), 0};
  return cuda::kSuccess;
}

// ---- streams, events, graphs ----------------------------------------------------------------------------------------

EXPORT Result cudaStreamCreateWithPriority(Handle* made, unsigned flags, int priority) {
  *made = dry::new_stream(flags, priority);
  return cuda::kSuccess;
}
EXPORT Result cudaStreamCreateWithFlags(Handle* made, unsigned flags) { return cudaStreamCreateWithPriority(made, flags, 0); }
EXPORT Result cudaStreamCreate(Handle* made) { return cudaStreamCreateWithPriority(made, 0, 0); }
EXPORT Result cudaStreamDestroy(Handle handle) {
  if (reinterpret_cast<uintptr_t>(handle) > 2) dry::end_stream(static_cast<dry::Stream*>(handle));
  return cuda::kSuccess;
}
EXPORT Result cudaStreamGetPriority(Handle handle, int* priority) {
  *priority = dry::stream(handle)->priority;
  return cuda::kSuccess;
}
EXPORT Result cudaStreamGetFlags(Handle handle, unsigned* flags) {
  *flags = dry::stream(handle)->flags;
  return cuda::kSuccess;
}
EXPORT Result cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cuda::kSuccess;
}
EXPORT Result cudaStreamQuery(Handle) { return cuda::kSuccess; }
EXPORT Result cudaStreamSynchronize(Handle) { return only_counted("cudaStreamSynchronize"); }
EXPORT Result cudaStreamWaitEvent(Handle handle, Handle event, unsigned) {
  dry::wait(dry::stream(handle), static_cast<dry::Event*>(event));
  dry::note("wait", handle, static_cast<dry::Event*>(event)->number);
  return only_counted("cudaStreamWaitEvent");
}
EXPORT Result cudaStreamAddCallback(Handle handle, void (*call)(Handle, Result, void*), void* data, unsigned) {
  call(handle, cuda::kSuccess, data);
  return cuda::kSuccess;
}
EXPORT Result cudaLaunchHostFunc(Handle, void (*call)(void*), void* data) {
  call(data);
  return cuda::kSuccess;
}

EXPORT Result cudaEventCreateWithFlags(Handle* made, unsigned) {
  *made = new dry::Event{0, 0, 0};
  return cuda::kSuccess;
}
EXPORT Result cudaEventCreate(Handle* made) { return cudaEventCreateWithFlags(made, 0); }
EXPORT Result cudaEventDestroy(Handle event) {
  delete static_cast<dry::Event*>(event);
  return cuda::kSuccess;
}
EXPORT Result cudaEventRecordWithFlags(Handle event, Handle stream, unsigned) {
  static std::atomic<uint64_t> next_number{1};
  const uint64_t number = next_number++;
  *static_cast<dry::Event*>(event) = {dry::stream(stream)->capture, dry::now_nanoseconds(), number};
  dry::note("event", stream, number);
  return only_counted("cudaEventRecord");
}
EXPORT Result cudaEventRecord(Handle event, Handle stream) { return cudaEventRecordWithFlags(event, stream, 0); }
EXPORT Result cudaEventQuery(Handle) { return cuda::kSuccess; }
EXPORT Result cudaEventSynchronize(Handle) { return only_counted("cudaEventSynchronize"); }
EXPORT Result cudaEventElapsedTime(float* milliseconds, Handle begin, Handle end) {
  const auto nanoseconds = static_cast<dry::Event*>(end)->nanoseconds - static_cast<dry::Event*>(begin)->nanoseconds;
  *milliseconds = static_cast<float>(nanoseconds) / 1e6f;
  return cuda::kSuccess;
}

// A graph is captured, so that the allocator gives its tensors a pool of their own, and replayed as nothing.
EXPORT Result cudaStreamBeginCapture(Handle handle, int) {
  dry::begin_capture(dry::stream(handle));
  return only_counted("graphs captured");
}
EXPORT Result cudaStreamBeginCaptureToGraph(Handle handle, Handle, const void*, const void*, size_t, int mode) {
  return cudaStreamBeginCapture(handle, mode);
}
EXPORT Result cudaStreamEndCapture(Handle handle, Handle* graph) {
  if (dry::stream(handle)->capture == 0) return say(cuda::kCaptureUnmatched);
  dry::end_capture(dry::stream(handle));
  *graph = new_thing();
  return cuda::kSuccess;
}
EXPORT Result cudaStreamIsCapturing(Handle handle, int* status) {
  *status = dry::stream(handle)->capture ? cuda::kCaptureActive : cuda::kCaptureNone;
  return cuda::kSuccess;
}

namespace {

Result capture_info(Handle handle, int* status, unsigned long long* id, Handle* graph, const Handle** nodes, const void** edges, size_t* count) {
  static Handle any_graph = new_thing();
  const dry::Stream* stream = dry::stream(handle);
  if (status != nullptr) *status = stream->capture ? cuda::kCaptureActive : cuda::kCaptureNone;
  if (id != nullptr) *id = stream->capture;
  if (graph != nullptr) *graph = stream->capture ? any_graph : nullptr;
  if (nodes != nullptr) *nodes = nullptr;
  if (edges != nullptr) *edges = nullptr;
  if (count != nullptr) *count = 0;
  return cuda::kSuccess;
}

}  // namespace

EXPORT Result cudaStreamGetCaptureInfo_v2(Handle handle, int* status, unsigned long long* id, Handle* graph, const Handle** nodes, size_t* count) {
  return capture_info(handle, status, id, graph, nodes, nullptr, count);
}
EXPORT Result cudaStreamGetCaptureInfo_v3(Handle handle, int* status, unsigned long long* id, Handle* graph, const Handle** nodes, const void** edges, size_t* count) {
  return capture_info(handle, status, id, graph, nodes, edges, count);
}
EXPORT Result cudaStreamGetCaptureInfo(Handle handle, int* status, unsigned long long* id
#if CUDA_MAJOR >= 13
                                       , Handle* graph, const Handle** nodes, const void** edges, size_t* count) {
  return capture_info(handle, status, id, graph, nodes, edges, count);
}
#else
) {
  return capture_info(handle, status, id, nullptr, nullptr, nullptr, nullptr);
}
#endif
EXPORT Result cudaStreamUpdateCaptureDependencies() { return cuda::kSuccess; }
EXPORT Result cudaThreadExchangeStreamCaptureMode(int*) { return cuda::kSuccess; }
EXPORT Result cudaGraphCreate(Handle* graph, unsigned) {
  *graph = new_thing();
  return cuda::kSuccess;
}
EXPORT Result cudaGraphDestroy(Handle) { return cuda::kSuccess; }
EXPORT Result cudaGraphInstantiate(Handle* made, Handle) {
  *made = new_thing();
  return cuda::kSuccess;
}
EXPORT Result cudaGraphInstantiateWithFlags(Handle* made, Handle graph, unsigned long long) { return cudaGraphInstantiate(made, graph); }
EXPORT Result cudaGraphExecDestroy(Handle) { return cuda::kSuccess; }
EXPORT Result cudaGraphLaunch(Handle, Handle) { return only_counted("graphs launched"); }
EXPORT Result cudaGraphGetNodes(Handle, Handle*, size_t* count) {
  *count = 0;
  return cuda::kSuccess;
}

// ---- kernels --------------------------------------------------------------------------------------------------------

static Result launched(Handle stream) {
  dry::note("kernel", stream, 0);
  return only_counted("kernels");
}
EXPORT Result cudaLaunchKernel(const void*, cuda::Dim3, cuda::Dim3, void**, size_t, Handle stream) { return launched(stream); }
EXPORT Result cudaLaunchKernelExC(const void*, const void*, void**) { return only_counted("kernels"); }
EXPORT Result cudaLaunchCooperativeKernel(const void*, cuda::Dim3, cuda::Dim3, void**, size_t, Handle stream) { return launched(stream); }
EXPORT Result __cudaLaunchKernel(Handle, cuda::Dim3, cuda::Dim3, void**, size_t, Handle stream) { return launched(stream); }
EXPORT Result __cudaGetKernel(Handle* kernel, const void* function) {
  *kernel = const_cast<void*>(function);
  return cuda::kSuccess;
}
// A kernel is of the newest generation that torch is built for and the card runs: 8.6 for 8.9. CUB refuses others.
static int generation_of_kernels() {
#ifdef __aarch64__  // torch's wheel for it has kernels of 8.0, and none of 8.6
  constexpr bool kHas86 = false;
#else
  constexpr bool kHas86 = true;
#endif
  const int major = dry::kind().major, minor = dry::kind().minor;
  return major * 10 + (major == 8 ? (kHas86 && minor >= 6 ? 6 : 0) : major > 9 ? 0 : minor);
}
EXPORT Result cudaFuncGetAttributes(cuda::FunctionAttributes* found, const void*) {
  std::memset(found, 0, sizeof *found);
  found->max_threads_per_block = 1024;
  found->num_registers = 32;
  found->ptx_version = found->binary_version = generation_of_kernels();
  found->max_dynamic_shared_bytes = static_cast<int>(dry::kind().shared_optin_bytes);
  return cuda::kSuccess;
}
EXPORT Result cudaFuncSetAttribute(const void*, int, int) { return cuda::kSuccess; }
EXPORT Result cudaKernelSetAttributeForDevice(Handle, int, int, int) { return cuda::kSuccess; }
// As many blocks as threads allow: registers and shared memory of a kernel are not known.
EXPORT Result cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* count, const void*, int block, size_t, unsigned) {
  *count = block > 0 && block < static_cast<int>(dry::kind().max_threads) ? static_cast<int>(dry::kind().max_threads) / block : 1;
  return cuda::kSuccess;
}
EXPORT Result cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* count, const void* kernel, int block, size_t shared) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(count, kernel, block, shared, 0);
}
EXPORT Result cudaLibraryLoadData(Handle* made) {
  *made = new_thing();
  return cuda::kSuccess;
}
EXPORT Result cudaLibraryGetKernel(Handle* made) {
  *made = new_thing();
  return cuda::kSuccess;
}
EXPORT Result cudaLibraryUnload(Handle) { return cuda::kSuccess; }
EXPORT Result cudaProfilerStart() { return cuda::kSuccess; }
EXPORT Result cudaProfilerStop() { return cuda::kSuccess; }

EXPORT Handle* __cudaRegisterFatBinary(void*) { return static_cast<Handle*>(new_thing()); }
EXPORT void __cudaRegisterFatBinaryEnd(Handle*) {}
EXPORT void __cudaUnregisterFatBinary(Handle*) {}
EXPORT void __cudaRegisterFunction(Handle*, const char*, char*, const char*, int, void*, void*, void*, void*, int*) {}
EXPORT void __cudaRegisterVar(Handle*, char*, char*, const char*, int, size_t, int, int) {}
EXPORT char __cudaInitModule(Handle*) { return 1; }

namespace {

struct Launch {
  cuda::Dim3 grid, block;
  size_t shared_bytes;
  Handle stream;
};
thread_local std::deque<Launch> launches;

}  // namespace

EXPORT unsigned __cudaPushCallConfiguration(cuda::Dim3 grid, cuda::Dim3 block, size_t shared_bytes, Handle stream) {
  launches.push_back({grid, block, shared_bytes, stream});
  return 0;
}
EXPORT Result __cudaPopCallConfiguration(cuda::Dim3* grid, cuda::Dim3* block, size_t* shared_bytes, Handle* stream) {
  const Launch& last = launches.back();
  *grid = last.grid;
  *block = last.block;
  *shared_bytes = last.shared_bytes;
  *stream = last.stream;
  launches.pop_back();
  return cuda::kSuccess;
}

// ---- the driver's functions, by name --------------------------------------------------------------------------------

// In libcuda (driver.cpp), which is loaded with this library.
extern "C" void* drycuda_driver_function(const char* name);

EXPORT Result cudaGetDriverEntryPoint(const char* name, void** function, unsigned long long, int* found) {
  *function = drycuda_driver_function(name);
  if (found != nullptr) *found = *function == nullptr;
  return cuda::kSuccess;
}
EXPORT Result cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long flags, int* found) {
  return cudaGetDriverEntryPoint(name, function, flags, found);
}
