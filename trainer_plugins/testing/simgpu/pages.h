// Host addresses without memory, and memory mapped to them: like CUDA's cuMemAddressReserve, cuMemMap and cuMemUnmap.
#pragma once

#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <cstddef>

namespace simgpu::pages {

inline size_t round_up(size_t number, size_t step) { return (number + step - 1) / step * step; }

// Null if the process may not have that many.
inline char* take_addresses(size_t num_bytes) {
  void* start = mmap(nullptr, num_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return start == MAP_FAILED ? nullptr : static_cast<char*>(start);
}

// The host gives pages when they are first written, so a card may be larger than the host's memory.
inline void map(char* address, size_t num_bytes) {
  TORCH_CHECK(mprotect(address, num_bytes, PROT_READ | PROT_WRITE) == 0, "simgpu: the host maps no more memory");
}

inline void unmap(char* address, size_t num_bytes) {
  madvise(address, num_bytes, MADV_DONTNEED);
  TORCH_CHECK(mprotect(address, num_bytes, PROT_NONE) == 0, "simgpu: the host unmaps no memory");
}

}  // namespace simgpu::pages
