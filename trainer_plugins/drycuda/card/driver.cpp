// libcuda: the driver's functions that torch asks for by name, and those that Triton's launchers are linked to.
#include <dlfcn.h>

#include <cstring>
#include <map>
#include <mutex>

#include "core.h"

using cuda::Result;
using Handle = void*;
using Address = unsigned long long;

namespace {

std::mutex pages_lock;
struct Pages {
  size_t num_bytes;
  int device;
};
auto& pages = *new std::map<uint64_t, Pages>;
uint64_t next_pages = 1;

Handle context() {
  static char here;
  return &here;
}

Result made(Handle* handle) {
  *handle = new char;
  return cuda::kSuccess;
}

// CUmemAllocationProp: type, requested handle types, then the place (its kind and number).
struct Place {
  int type, handle_types, kind, number;
};

}  // namespace

EXPORT Result cuInit(unsigned) { return dry::num_devices() ? cuda::kSuccess : cuda::kNoDevice; }
EXPORT Result cuDriverGetVersion(int* version) {
  *version = dry::kind().driver;
  return cuda::kSuccess;
}
EXPORT Result cuDeviceGetCount(int* count) {
  *count = dry::num_devices();
  return cuda::kSuccess;
}
EXPORT Result cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return ordinal < dry::num_devices() ? cuda::kSuccess : cuda::kInvalidDevice;
}
EXPORT Result cuDeviceGetName(char* text, int length, int) {
  std::strncpy(text, dry::kind().name.c_str(), length);
  return cuda::kSuccess;
}
EXPORT Result cuDeviceTotalMem_v2(size_t* num_bytes, int device) {
  *num_bytes = dry::total_bytes(device);
  return cuda::kSuccess;
}
extern "C" Result cudaDeviceGetAttribute(int* value, int attribute, int device);
EXPORT Result cuDeviceGetAttribute(int* value, int attribute, int device) { return cudaDeviceGetAttribute(value, attribute, device); }
EXPORT Result cuDeviceGetUuid_v2(char* uuid, int device) {
  std::memcpy(uuid, dry::uuid_bytes(device).data(), 16);
  return cuda::kSuccess;
}
EXPORT Result cuGetErrorString(Result result, const char** text) {
  *text = result == cuda::kOutOfMemory ? "out of memory" : result == cuda::kSuccess ? "no error" : "an error of the dry card";
  return cuda::kSuccess;
}
EXPORT Result cuGetErrorName(Result result, const char** text) {
  *text = result == cuda::kOutOfMemory ? "CUDA_ERROR_OUT_OF_MEMORY" : result == cuda::kSuccess ? "CUDA_SUCCESS" : "CUDA_ERROR_UNKNOWN";
  return cuda::kSuccess;
}

EXPORT Result cuLogsRegisterCallback(void*, void*, Handle* registered) { return made(registered); }  // torch 2.14

EXPORT Result cuCtxGetCurrent(Handle* found) {
  *found = context();
  return cuda::kSuccess;
}
EXPORT Result cuCtxSetCurrent(Handle) { return cuda::kSuccess; }
EXPORT Result cuCtxPushCurrent_v2(Handle) { return cuda::kSuccess; }
EXPORT Result cuCtxPopCurrent_v2(Handle* found) { return cuCtxGetCurrent(found); }
EXPORT Result cuCtxGetDevice(int* device) {
  *device = dry::current_device();
  return cuda::kSuccess;
}
EXPORT Result cuCtxSynchronize() { return cuda::kSuccess; }
EXPORT Result cuDevicePrimaryCtxRetain(Handle* found, int device) {
  dry::enter_device(device);
  *found = context();
  return cuda::kSuccess;
}
EXPORT Result cuDevicePrimaryCtxRelease_v2(int) { return cuda::kSuccess; }
EXPORT Result cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* is_active) {
  *flags = 0;
  *is_active = dry::is_entered(device);  // torch's threads select no card without a context
  return cuda::kSuccess;
}

// Pages at addresses, for expandable segments. Pages count as soon as they are created.
EXPORT Result cuMemGetAllocationGranularity(size_t* num_bytes, const void*, int) {
  *num_bytes = 2 << 20;
  return cuda::kSuccess;
}
EXPORT Result cuMemAddressReserve(Address* start, size_t num_bytes, size_t, Address, unsigned long long) {
  *start = reinterpret_cast<Address>(dry::reserve_addresses(num_bytes));
  return *start ? cuda::kSuccess : cuda::kOutOfMemory;
}
EXPORT Result cuMemAddressFree(Address start, size_t num_bytes) {
  dry::drop_addresses(reinterpret_cast<void*>(start), num_bytes);
  return cuda::kSuccess;
}
EXPORT Result cuMemCreate(uint64_t* handle, size_t num_bytes, const Place* place, unsigned long long) {
  dry::count("cuMemCreate");
  if (!dry::take(place->number, num_bytes)) return cuda::kOutOfMemory;
  std::lock_guard<std::mutex> guard(pages_lock);
  *handle = next_pages++;
  pages[*handle] = {num_bytes, place->number};
  return cuda::kSuccess;
}
// Pages are given to no other process, and a card is not divided. Before torch says OOM, it looks for all of these.
#define NOT_SUPPORTED(name) \
  EXPORT Result name() { return cuda::kNotSupported; }
NOT_SUPPORTED(cuMemExportToShareableHandle)
NOT_SUPPORTED(cuMemImportFromShareableHandle)
NOT_SUPPORTED(cuMemGetAddressRange)
NOT_SUPPORTED(cuMemGetAllocationPropertiesFromHandle)
NOT_SUPPORTED(cuMemRetainAllocationHandle)
NOT_SUPPORTED(cuMulticastCreate)
NOT_SUPPORTED(cuMulticastAddDevice)
NOT_SUPPORTED(cuMulticastBindMem)
NOT_SUPPORTED(cuMulticastUnbind)
NOT_SUPPORTED(cuStreamWriteValue32)
NOT_SUPPORTED(cuDeviceGetDevResource)
NOT_SUPPORTED(cuDevSmResourceSplitByCount)
NOT_SUPPORTED(cuDevResourceGenerateDesc)
NOT_SUPPORTED(cuGreenCtxCreate)
NOT_SUPPORTED(cuGreenCtxDestroy)
NOT_SUPPORTED(cuGreenCtxStreamCreate)
NOT_SUPPORTED(cuCtxFromGreenCtx)
NOT_SUPPORTED(cuCtxPushCurrent)
NOT_SUPPORTED(cuCtxPopCurrent)
NOT_SUPPORTED(cuLogsUnregisterCallback)
#undef NOT_SUPPORTED
EXPORT Result cuMemRelease(uint64_t handle) {
  std::lock_guard<std::mutex> guard(pages_lock);
  const auto found = pages.find(handle);
  if (found == pages.end()) return cuda::kInvalidValue;
  dry::give_back(found->second.device, found->second.num_bytes);
  pages.erase(found);
  return cuda::kSuccess;
}
EXPORT Result cuMemMap(Address start, size_t num_bytes, size_t, uint64_t handle, unsigned long long) {
  std::lock_guard<std::mutex> guard(pages_lock);
  const auto found = pages.find(handle);
  if (found == pages.end()) return cuda::kInvalidValue;
  dry::place(reinterpret_cast<void*>(start), num_bytes, found->second.device);
  return cuda::kSuccess;
}
EXPORT Result cuMemUnmap(Address start, size_t num_bytes) {
  dry::unplace_all(reinterpret_cast<void*>(start), num_bytes);
  return cuda::kSuccess;
}
EXPORT Result cuMemSetAccess(Address, size_t, const void*, size_t) { return cuda::kSuccess; }

EXPORT Result cuPointerGetAttribute(void* data, int attribute, Address address) {
  constexpr int kDevicePointer = 3;  // CU_POINTER_ATTRIBUTE_DEVICE_POINTER: Triton queries it for each argument
  const bool is_known = dry::device_of(reinterpret_cast<void*>(address)) >= 0 || dry::is_pinned(reinterpret_cast<void*>(address));
  if (!is_known) return cuda::kInvalidValue;
  if (attribute == kDevicePointer) *static_cast<Address*>(data) = address;
  else *static_cast<int*>(data) = 0;
  return cuda::kSuccess;
}
EXPORT Result cuMemsetD32Async(Address to, unsigned value, size_t count, Handle) {
  if (value == 0) dry::fill(reinterpret_cast<void*>(to), 0, count * sizeof value);
  return cuda::kSuccess;
}
EXPORT Result cuMemsetD8Async(Address to, unsigned char value, size_t count, Handle) {
  dry::fill(reinterpret_cast<void*>(to), value, count);
  return cuda::kSuccess;
}

// Kernels of Triton and of NVRTC: loaded as a handle, launched as a count.
EXPORT Result cuModuleLoadData(Handle* module, const void*) { return made(module); }
EXPORT Result cuModuleLoadDataEx(Handle* module, const void*, unsigned, int*, void**) { return made(module); }
EXPORT Result cuModuleLoad(Handle* module, const char*) { return made(module); }
EXPORT Result cuModuleUnload(Handle) { return cuda::kSuccess; }
EXPORT Result cuModuleGetFunction(Handle* function, Handle, const char*) { return made(function); }
EXPORT Result cuLibraryLoadData(Handle* library) { return made(library); }
EXPORT Result cuLibraryGetKernel(Handle* kernel, Handle, const char*) { return made(kernel); }
EXPORT Result cuLinkCreate_v2(unsigned, int*, void**, Handle* state) { return made(state); }
EXPORT Result cuLinkAddData_v2() { return cuda::kSuccess; }
EXPORT Result cuLinkComplete(Handle, void** code, size_t* num_bytes) {
  static char nothing;
  *code = &nothing;
  *num_bytes = 1;
  return cuda::kSuccess;
}
EXPORT Result cuFuncGetAttribute(int* value, int attribute, Handle) {
  constexpr int kMaxThreads = 0, kNumRegisters = 4;
  *value = attribute == kMaxThreads ? 1024 : attribute == kNumRegisters ? 32 : 0;
  return cuda::kSuccess;
}
EXPORT Result cuFuncSetAttribute(Handle, int, int) { return cuda::kSuccess; }
EXPORT Result cuFuncSetCacheConfig(Handle, int) { return cuda::kSuccess; }
EXPORT Result cuOccupancyMaxActiveBlocksPerMultiprocessor(int* count, Handle, int block, size_t) {
  *count = block > 0 ? static_cast<int>(dry::kind().max_threads) / block : 1;
  return cuda::kSuccess;
}
EXPORT Result cuOccupancyMaxActiveClusters(int* count, Handle, const void*) {
  *count = dry::kind().multiprocessors;
  return cuda::kSuccess;
}
EXPORT Result cuLaunchKernel() {
  dry::count("kernels");
  return cuda::kSuccess;
}
EXPORT Result cuLaunchKernelEx() { return cuLaunchKernel(); }
EXPORT Result cuLaunchCooperativeKernel() { return cuLaunchKernel(); }
EXPORT Result cuTensorMapEncodeTiled() { return cuda::kSuccess; }
EXPORT Result cuStreamGetCaptureInfo(Handle stream, int* status) {
  *status = dry::stream(stream)->capture ? cuda::kCaptureActive : cuda::kCaptureNone;
  return cuda::kSuccess;
}

// A name without a version stands for its newest one, as in cuda.h.
EXPORT void* drycuda_driver_function(const char* name) {
  static void* own = [] {
    Dl_info info{};
    dladdr(reinterpret_cast<void*>(&cuInit), &info);
    return dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  }();
  for (const char* version : {"_v2", ""})
    if (void* found = dlsym(own, (std::string(name) + version).c_str())) return found;
  return nullptr;
}
EXPORT Result cuGetProcAddress_v2(const char* name, void** function, int, uint64_t, int* status) {
  *function = drycuda_driver_function(name);
  if (status != nullptr) *status = *function == nullptr;
  return *function != nullptr ? cuda::kSuccess : cuda::kNotFound;
}
EXPORT Result cuGetProcAddress(const char* name, void** function, int version, uint64_t flags) {
  return cuGetProcAddress_v2(name, function, version, flags, nullptr);
}
