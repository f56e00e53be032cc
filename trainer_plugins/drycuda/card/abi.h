// CUDA's binary interface: the numbers and layouts that torch was compiled with, declared here so that we need none of
// NVIDIA's headers. Layouts: driver_types.h of nvidia-cuda-runtime 12.8 and 13.0; cuda.h for the driver.
#pragma once

#include <cstddef>
#include <cstdint>

#ifndef CUDA_MAJOR
#error "compile with -DCUDA_MAJOR=12 or 13"
#endif

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace cuda {

// cudaError_t and CUresult share these numbers.
enum Result : int {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNoDevice = 100,
  kInvalidDevice = 101,
  kInvalidHandle = 400,
  kNotFound = 500,
  kNotReady = 600,
  kPeerAlreadyEnabled = 704,
  kNotSupported = 801,
  kCaptureUnmatched = 905,
};

// cudaDeviceAttr and CUdevice_attribute share these numbers.
enum Attribute : int {
  kMaxThreadsPerBlock = 1,
  kMaxBlockDimX = 2,
  kMaxBlockDimY = 3,
  kMaxBlockDimZ = 4,
  kMaxGridDimX = 5,
  kMaxGridDimY = 6,
  kMaxGridDimZ = 7,
  kMaxSharedMemoryPerBlock = 8,
  kTotalConstantMemory = 9,
  kWarpSize = 10,
  kMaxPitch = 11,
  kMaxRegistersPerBlock = 12,
  kClockRate = 13,
  kTextureAlignment = 14,
  kMultiProcessorCount = 16,
  kCanMapHostMemory = 19,
  kConcurrentKernels = 31,
  kPciBusId = 33,
  kPciDeviceId = 34,
  kMemoryClockRate = 36,
  kGlobalMemoryBusWidth = 37,
  kL2CacheSize = 38,
  kMaxThreadsPerMultiProcessor = 39,
  kAsyncEngineCount = 40,
  kUnifiedAddressing = 41,
  kComputeCapabilityMajor = 75,
  kComputeCapabilityMinor = 76,
  kStreamPrioritiesSupported = 78,
  kMaxSharedMemoryPerMultiprocessor = 81,
  kMaxRegistersPerMultiprocessor = 82,
  kManagedMemory = 83,
  kConcurrentManagedAccess = 89,
  kComputePreemptionSupported = 90,
  kCooperativeLaunch = 95,
  kMaxSharedMemoryPerBlockOptin = 97,
  kHostRegisterSupported = 99,
  kVirtualMemoryManagementSupported = 102,
  kMaxBlocksPerMultiprocessor = 106,
  kReservedSharedMemoryPerBlock = 111,
  kMemoryPoolsSupported = 115,
  kClusterLaunch = 120,
};

enum CopyKind : int { kHostToHost, kHostToDevice, kDeviceToHost, kDeviceToDevice, kDefaultKind };
enum MemoryType : int { kUnregistered, kHostMemory, kDeviceMemory, kManagedMemoryType };
enum CaptureStatus : int { kCaptureNone, kCaptureActive, kCaptureInvalidated };

struct Dim3 {
  unsigned x, y, z;
};

struct PointerAttributes {
  MemoryType type;
  int device;
  void* device_pointer;
  void* host_pointer;
#if CUDA_MAJOR >= 13
  long reserved[8];
#endif
};

struct FunctionAttributes {
  size_t shared_bytes, const_bytes, local_bytes;
  int max_threads_per_block, num_registers, ptx_version, binary_version, cache_mode;
  int max_dynamic_shared_bytes, preferred_carveout;
  int cluster_must_be_set, cluster_width, cluster_height, cluster_depth, cluster_policy;
  int non_portable_cluster, reserved[16];
};

// cudaDeviceProp. CUDA 13 removed the fields that are available as attributes.
struct DeviceProperties {
  char name[256];
  char uuid[16];
  char luid[8];
  unsigned luid_node_mask;
  size_t total_bytes, shared_per_block;
  int registers_per_block, warp_size;
  size_t memory_pitch;
  int max_threads_per_block, max_block[3], max_grid[3];
#if CUDA_MAJOR < 13
  int clock_khz;
#endif
  size_t const_bytes;
  int major, minor;
  size_t texture_alignment, texture_pitch_alignment;
#if CUDA_MAJOR < 13
  int device_overlap;
#endif
  int num_multiprocessors;
#if CUDA_MAJOR < 13
  int kernel_timeout;
#endif
  int integrated, can_map_host;
#if CUDA_MAJOR < 13
  int compute_mode;
#endif
  int texture_1d, texture_1d_mipmap;
#if CUDA_MAJOR < 13
  int texture_1d_linear;
#endif
  int texture_2d[2], texture_2d_mipmap[2], texture_2d_linear[3], texture_2d_gather[2];
  int texture_3d[3], texture_3d_alternate[3], texture_cubemap;
  int texture_1d_layered[2], texture_2d_layered[3], texture_cubemap_layered[2];
  int surface_1d, surface_2d[2], surface_3d[3], surface_1d_layered[2], surface_2d_layered[3];
  int surface_cubemap, surface_cubemap_layered[2];
  size_t surface_alignment;
  int concurrent_kernels, ecc, pci_bus, pci_device, pci_domain, tcc, num_copy_engines, unified_addressing;
#if CUDA_MAJOR < 13
  int memory_clock_khz;
#endif
  int memory_bus_bits, l2_bytes, persisting_l2_bytes, max_threads_per_multiprocessor;
  int stream_priorities, global_l1, local_l1;
  size_t shared_per_multiprocessor;
  int registers_per_multiprocessor, managed_memory, is_multi_board, multi_board_group, host_atomics;
#if CUDA_MAJOR < 13
  int double_ratio;
#endif
  int pageable_access, concurrent_managed, preemption, host_pointer_for_registered, cooperative_launch;
#if CUDA_MAJOR < 13
  int cooperative_multi_device;
#endif
  size_t shared_per_block_optin;
  int pageable_by_host_tables, direct_managed_access, max_blocks_per_multiprocessor, access_window_bytes;
  size_t reserved_shared_per_block;
  int host_register, sparse_arrays, host_register_read_only, timeline_semaphores, memory_pools, rdma;
  unsigned rdma_flush;
  int rdma_order;
  unsigned pool_handle_types;
  int deferred_arrays, ipc_events, cluster_launch, unified_function_pointers;
#if CUDA_MAJOR < 13
  int reserved[63];
#else
  int numa_config, numa_id, mps, host_numa_id;
  unsigned gpu_pci_device, gpu_pci_subsystem;
  int multinode_ipc, reserved[56];
#endif
};
static_assert(sizeof(DeviceProperties) == (CUDA_MAJOR < 13 ? 1032 : 1008), "cudaDeviceProp has another size");

struct IpcHandle {
  char bytes[64];
};

}  // namespace cuda
