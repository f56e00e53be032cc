// Counts the main memory of tensors. torch's allocator for the CPU calls posix_memalign, and a file that torch
// loads is a map of it. The libraries of the card are loaded first, so both calls come here.
#include <dlfcn.h>
#include <malloc.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <map>
#include <utility>

#include "core.h"

namespace {

constexpr size_t kLeastBytes = 64 << 10;  // smaller ones are many, and add up to little

std::mutex lock;
std::map<void*, size_t>* held = nullptr;  // made late, and never destroyed: the last calls come when all else is
size_t now = 0, most = 0;  // of all of them; guarded by lock

// Requests that the kernel refused as larger than its memory: pages that are never written take none.
constexpr size_t kRefusedBytes = 1 << 30;
std::mutex lock_of_mapped;
std::map<void*, size_t>* mapped = nullptr;  // guarded by lock_of_mapped
std::atomic<size_t> num_mapped = 0;

// A process forked while another thread counts could wait forever.
void lock_all() {
  lock.lock();
  lock_of_mapped.lock();
}
void unlock_all() {
  lock_of_mapped.unlock();
  lock.unlock();
}
[[maybe_unused]] const int at_fork = pthread_atfork(lock_all, unlock_all, unlock_all);

void hold(void* start, size_t num_bytes) {
  std::lock_guard<std::mutex> guard(lock);
  if (held == nullptr) held = new std::map<void*, size_t>;
  if (held->emplace(start, num_bytes).second) most = std::max(most, now += num_bytes);
}

void give_up(void* start) {
  std::lock_guard<std::mutex> guard(lock);
  if (held == nullptr) return;
  const auto found = held->find(start);
  if (found == held->end()) return;
  now -= found->second;
  held->erase(found);
}

int map_unreserved(void** start, size_t num_bytes) {
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* const made = reinterpret_cast<void*>(syscall(SYS_mmap, nullptr, num_bytes, PROT_READ | PROT_WRITE, kFlags, -1, 0));
  if (made == MAP_FAILED) return ENOMEM;
  std::lock_guard<std::mutex> guard(lock_of_mapped);
  if (mapped == nullptr) mapped = new std::map<void*, size_t>;
  mapped->emplace(made, num_bytes);
  ++num_mapped;
  *start = made;
  return 0;
}

bool unmap(void* start) {
  if (num_mapped == 0) return false;
  std::map<void*, size_t>::node_type its;  // freed when the lock is open: to free comes here again
  std::unique_lock<std::mutex> guard(lock_of_mapped);
  const auto found = mapped->find(start);
  if (found == mapped->end()) return false;
  its = mapped->extract(found);
  --num_mapped;
  guard.unlock();
  give_up(start);
  syscall(SYS_munmap, start, its.mapped());
  return true;
}

bool is_file_of_weights(int file) {
  char link[64], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  const ssize_t length = readlink(link, path, sizeof path);
  constexpr const char* kEnding = ".safetensors";
  const ssize_t from = length - static_cast<ssize_t>(std::strlen(kEnding));
  return from >= 0 && std::memcmp(path + from, kEnding, std::strlen(kEnding)) == 0;
}

}  // namespace

void dry::hold_pinned(void* start, size_t num_bytes) { hold(start, num_bytes); }

// libc's own, or that of a library that was preloaded instead of it. To look for it may free something.
template <typename Function>
static Function* next(std::atomic<Function*>& known, const char* name) {
  thread_local bool is_looking = false;
  if (known == nullptr && !is_looking) {
    is_looking = true;
    known = reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
    is_looking = false;
  }
  return known;
}

EXPORT int posix_memalign(void** start, size_t alignment, size_t num_bytes) noexcept {
  static std::atomic<int (*)(void**, size_t, size_t)> known;
  int failed = next(known, "posix_memalign")(start, alignment, num_bytes);
  if (failed == ENOMEM && num_bytes >= kRefusedBytes) failed = map_unreserved(start, num_bytes);
  if (failed == 0 && num_bytes >= kLeastBytes) hold(*start, num_bytes);
  return failed;
}

EXPORT void free(void* start) noexcept {
  static std::atomic<void (*)(void*)> known;
  if (start == nullptr) return;
  if (unmap(start)) return;
  if (malloc_usable_size(start) >= kLeastBytes) give_up(start);
  if (auto* const real = next(known, "free")) real(start);
}

static void* map_file(void* at, size_t num_bytes, int protection, int flags, int file, off_t offset) {
  void* start = reinterpret_cast<void*>(syscall(SYS_mmap, at, num_bytes, protection, flags, file, offset));
  // Read-only maps, such as Arrow's files and safetensors, are the kernel's to keep; NCCL's memory is the card's.
  const bool is_tensors = file >= 0 && (protection & PROT_WRITE) && !(flags & (MAP_NORESERVE | MAP_FIXED));
  if (start != MAP_FAILED && is_tensors && num_bytes >= kLeastBytes && !is_file_of_weights(file)) hold(start, num_bytes);
  return start;
}
EXPORT void* mmap(void* at, size_t num_bytes, int protection, int flags, int file, off_t offset) noexcept {
  return map_file(at, num_bytes, protection, flags, file, offset);
}
EXPORT void* mmap64(void* at, size_t num_bytes, int protection, int flags, int file, off64_t offset) noexcept {
  return map_file(at, num_bytes, protection, flags, file, offset);
}
EXPORT int munmap(void* start, size_t num_bytes) noexcept {
  give_up(start);
  return static_cast<int>(syscall(SYS_munmap, start, num_bytes));
}

// Returns the most since the last call.
EXPORT size_t drycuda_host_peak() {
  std::lock_guard<std::mutex> guard(lock);
  return std::exchange(most, now);
}
