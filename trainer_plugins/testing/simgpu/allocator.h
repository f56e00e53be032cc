// A caching allocator with CUDA's rules over host memory and a card file. It follows the default path of
// c10/cuda/CUDACachingAllocator.cpp (one stream, no max_split_size, no garbage collection), and its expandable segments:
// names and order are that file's, so that the two can be read side by side.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "../card_file.h"
#include "pages.h"

namespace simgpu {

// c10/core/AllocatorConfig.h and, for kLargeBuffer, CUDACachingAllocator.cpp.
constexpr size_t kMinBlockSize = 512;            // every size is rounded up to a multiple of this
constexpr size_t kSmallSize = 1048576;           // the largest allocation of the small pool
constexpr size_t kSmallBuffer = 2097152;         // a segment of the small pool
constexpr size_t kMinLargeAlloc = 10485760;      // below this a large allocation shares a kLargeBuffer
constexpr size_t kLargeBuffer = 20971520;        // a segment of the large pool for allocations below kMinLargeAlloc
constexpr size_t kRoundLarge = 2097152;          // larger segments are rounded up to a multiple of this
const c10::Device kDevice(c10::DeviceType::PrivateUse1, 0);

struct Block {
  char* ptr;
  size_t size;
  size_t requested_size = 0;
  bool is_small = false;
  bool allocated = false;
  Block* prev = nullptr;  // neighbours in the same segment
  Block* next = nullptr;
  char* expandable_segment = nullptr;  // where that begins; null in a segment of fixed size
  bool mapped = true;                  // whether there is memory at its addresses

  bool is_split() const { return prev || next; }
};

struct BySizeThenAddress {
  bool operator()(const Block* a, const Block* b) const {
    return a->size != b->size ? a->size < b->size : a->ptr < b->ptr;
  }
};

struct ByAddress {
  bool operator()(const Block* a, const Block* b) const { return a->ptr < b->ptr; }
};

void free_device_memory(void* ptr);  // DataPtr wants a plain function; defined below

class DeviceAllocator final : public c10::DeviceAllocator {
 public:
  simcard::Card card;

  c10::DataPtr allocate(size_t num_bytes) override {
    void* ptr = num_bytes ? malloc(num_bytes) : nullptr;
    return {ptr, ptr, &free_device_memory, kDevice};
  }

  void free(void* ptr) {
    if (!ptr) {
      return;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = allocated_blocks_.find(ptr);
    if (found != allocated_blocks_.end()) {
      Block* block = found->second;
      allocated_blocks_.erase(found);
      free_block(block);
    }
  }

  // The n-th allocation from now raises, once. 0: none.
  void fail_at(uint64_t n) { allocations_until_failure_ = n; }
  uint64_t num_allocations() const { return num_allocations_; }

  // Whatever is free, the segments of this process together are no more than this.
  void limit(uint64_t num_bytes) { limit_bytes_ = num_bytes; }

  // New memory is mapped into segments that grow, as with PYTORCH_ALLOC_CONF=expandable_segments:True.
  void use_expandable_segments(bool use) { expandable_segments_ = use; }

  c10::DeleterFnPtr raw_deleter() const override { return &free_device_memory; }
  void copy_data(void* dest, const void* src, size_t count) const override { std::memcpy(dest, src, count); }
  bool initialized() override { return true; }
  void recordStream(const c10::DataPtr& /*ptr*/, c10::Stream /*stream*/) override {}  // there is one stream

  void emptyCache(c10::MempoolId_t /*pool*/ = {0, 0}) override {
    std::lock_guard<std::mutex> lock(mutex_);
    release_cached_blocks();
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex /*device*/) override {
    std::lock_guard<std::mutex> lock(mutex_);
    return stats_;
  }

  void resetAccumulatedStats(c10::DeviceIndex /*device*/) override {
    std::lock_guard<std::mutex> lock(mutex_);
    for_each_stat([](c10::CachingAllocator::Stat& stat) { stat.reset_accumulated(); });
    stats_.num_alloc_retries = stats_.num_ooms = stats_.num_device_alloc = stats_.num_device_free = 0;
  }

  void resetPeakStats(c10::DeviceIndex /*device*/) override {
    std::lock_guard<std::mutex> lock(mutex_);
    for_each_stat([](c10::CachingAllocator::Stat& stat) { stat.reset_peak(); });
  }

#if SIMGPU_TORCH_VERSION >= 210  // 2.9 has no such method, and torch.accelerator.get_memory_info came with it
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex /*device*/) override {
    return {card.free_bytes(), card.capacity_bytes()};
  }
#endif

 private:
  using Pool = std::set<Block*, BySizeThenAddress>;
  using Unmapped = std::set<Block*, ByAddress>;
  using StatArray = c10::CachingAllocator::StatArray;

  static size_t round_size(size_t size) {
    return size < kMinBlockSize ? kMinBlockSize : kMinBlockSize * ((size + kMinBlockSize - 1) / kMinBlockSize);
  }

  static size_t get_allocation_size(size_t size) {
    if (size <= kSmallSize) {
      return kSmallBuffer;
    }
    return size < kMinLargeAlloc ? kLargeBuffer : kRoundLarge * ((size + kRoundLarge - 1) / kRoundLarge);
  }

  bool should_split(const Block* block, size_t size) const {
    const size_t remaining = block->size - size;
    return block->is_small || expandable_segments_ ? remaining >= kMinBlockSize : remaining > kSmallSize;
  }

  Pool& pool_of(bool is_small) { return is_small ? small_blocks_ : large_blocks_; }

  void* malloc(size_t orig_size) {
    std::lock_guard<std::mutex> lock(mutex_);
    ++num_allocations_;
    const bool fails = allocations_until_failure_ > 0 && --allocations_until_failure_ == 0;
    const size_t size = round_size(orig_size);
    const bool is_small = size <= kSmallSize;
    const size_t alloc_size = get_allocation_size(size);
    Block* block = nullptr;
    if (!fails) {
      block = get_free_block(size, is_small);
      if (!block) {
        block = alloc_block(size, alloc_size, is_small);
      }
    }
    if (!block) {
      // An injected failure comes here too: a real one leaves an empty cache and a counted retry behind, and says that
      // the card is full.
      release_cached_blocks();
      ++stats_.num_alloc_retries;
      block = fails ? nullptr : alloc_block(size, alloc_size, is_small);
    }
    if (!block) {
      raise_out_of_memory(size, alloc_size, fails ? 0 : card.free_bytes());
    }
    alloc_found_block(block, orig_size, size);
    return block->ptr;
  }

  Block* get_free_block(size_t size, bool is_small) {
    Block key{nullptr, size};
    Pool& pool = pool_of(is_small);
    auto best = pool.lower_bound(&key);
    if (best == pool.end()) {
      return nullptr;
    }
    if ((*best)->expandable_segment) {  // its potential size counts
      for (auto next = std::next(best); next != pool.end() && (*best)->expandable_segment &&
                                        (*next)->expandable_segment && room_of(*next) < room_of(*best);) {
        best = next++;
      }
    }
    Block* block = *best;
    pool.erase(best);
    return block;
  }

  bool reserve(size_t num_bytes) {
    const auto reserved = static_cast<uint64_t>(stats_.reserved_bytes[0].current);
    return reserved + num_bytes <= limit_bytes_ && card.reserve(num_bytes);
  }

  Block* alloc_block(size_t size, size_t alloc_size, bool is_small) {
    if (expandable_segments_) {
      return try_allocate_expandable_block(size, is_small);
    }
    if (!reserve(alloc_size)) {
      return nullptr;
    }
    // The host gives pages when they are first written, so a card may be larger than the host's memory.
    constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* memory = mmap(nullptr, alloc_size, PROT_READ | PROT_WRITE, kFlags, -1, 0);
    if (memory == MAP_FAILED) {
      card.release(alloc_size);
      return nullptr;
    }
    ++stats_.num_device_alloc;
    add(stats_.segment, is_small, 1);
    add(stats_.reserved_bytes, is_small, static_cast<int64_t>(alloc_size));
    return new Block{static_cast<char*>(memory), alloc_size, 0, is_small};
  }

  void alloc_found_block(Block* block, size_t orig_size, size_t size) {
    const bool already_split = block->is_split();
    if (should_split(block, size)) {
      Block* remaining = cut(block, size, true);
      pool_of(block->is_small).insert(remaining);
      if (block->expandable_segment) {
        // Not counted: pages of these can always be given back.
      } else if (already_split) {  // an inactive split block has shrunk
        add(stats_.inactive_split_bytes, block->is_small, -static_cast<int64_t>(size));
      } else {
        add(stats_.inactive_split_bytes, block->is_small, static_cast<int64_t>(remaining->size));
        add(stats_.inactive_split, block->is_small, 1);
      }
    } else if (already_split && !block->expandable_segment) {  // an inactive split block becomes active
      add(stats_.inactive_split_bytes, block->is_small, -static_cast<int64_t>(block->size));
      add(stats_.inactive_split, block->is_small, -1);
    }
    block->allocated = true;
    block->requested_size = orig_size;
    allocated_blocks_[block->ptr] = block;
    count_active(*block, 1);
  }

  void free_block(Block* block) {
    count_active(*block, -1);
    block->allocated = false;
    int64_t split_blocks_change = 0, split_bytes_change = 0;
    for (Block* neighbour : {block->prev, block->next}) {
      if (neighbour && !neighbour->allocated && neighbour->mapped) {
        --split_blocks_change;
        split_bytes_change -= static_cast<int64_t>(neighbour->size);
        merge(block, neighbour);
      }
    }
    pool_of(block->is_small).insert(block);
    if (block->expandable_segment) {
      return;
    }
    if (block->is_split()) {
      ++split_blocks_change;
      split_bytes_change += static_cast<int64_t>(block->size);
    }
    add(stats_.inactive_split, block->is_small, split_blocks_change);
    add(stats_.inactive_split_bytes, block->is_small, split_bytes_change);
  }

  void merge(Block* block, Block* neighbour) {
    if (neighbour->mapped) {
      pool_of(block->is_small).erase(neighbour);
    } else {
      unmapped_of(block->is_small).erase(neighbour);
    }
    if (block->prev == neighbour) {
      block->ptr = neighbour->ptr;
      block->prev = neighbour->prev;
      if (block->prev) {
        block->prev->next = block;
      }
    } else {
      block->next = neighbour->next;
      if (block->next) {
        block->next->prev = block;
      }
    }
    block->size += neighbour->size;
    delete neighbour;
  }

  // Gives every segment without a live allocation back to the card.
  void release_cached_blocks() {
    for (Pool* pool : {&large_blocks_, &small_blocks_}) {
      for (Block* block : std::vector<Block*>(pool->begin(), pool->end())) {
        if (block->expandable_segment) {
          unmap_block(block);
        }
      }
      for (auto it = pool->begin(); it != pool->end();) {
        Block* block = *it;
        if (block->is_split() || block->expandable_segment) {
          ++it;
          continue;
        }
        it = pool->erase(it);
        munmap(block->ptr, block->size);
        card.release(block->size);
        ++stats_.num_device_free;
        add(stats_.segment, block->is_small, -1);
        add(stats_.reserved_bytes, block->is_small, -static_cast<int64_t>(block->size));
        delete block;
      }
    }
  }

  // Expandable segments: each pool has a range of addresses, into which pages are mapped as they are needed.

  static size_t page_bytes(bool is_small) { return is_small ? kSmallBuffer : kLargeBuffer; }

  static size_t room_of(const Block* block) {
    return block->size + (block->next && !block->next->mapped ? block->next->size : 0);
  }

  Unmapped& unmapped_of(bool is_small) { return is_small ? small_unmapped_ : large_unmapped_; }

  // Shortens a block, and returns the rest, which is in no set.
  static Block* cut(Block* block, size_t size, bool mapped) {
    auto* behind = new Block{block->ptr + size, block->size - size, 0, block->is_small, false, block, block->next,
                             block->expandable_segment, mapped};
    if (block->next) {
      block->next->prev = behind;
    }
    block->next = behind;
    block->size = size;
    return behind;
  }

  Block* try_allocate_expandable_block(size_t size, bool is_small) {
    Block* candidate = find_expandable_block(size, is_small);
    if (!candidate || (!candidate->mapped && !map_block(candidate, std::min(candidate->size, size)))) {
      return nullptr;
    }
    while (candidate->size < size) {
      Block* next = candidate->next;
      if (!next || !map_block(next, std::min(size - candidate->size, next->size))) {
        return nullptr;
      }
      candidate = next;  // it has merged with the block before it
    }
    pool_of(is_small).erase(candidate);
    return candidate;
  }

  Block* find_expandable_block(size_t size, bool is_small) {
    for (Block* unmapped : unmapped_of(is_small)) {
      Block* first = unmapped->prev && !unmapped->prev->allocated ? unmapped->prev : unmapped;
      size_t room = 0;
      for (Block* block = first; block && !block->allocated && room < size; block = block->next) {
        room += block->size;
      }
      if (room >= size) {
        return first;
      }
    }
    const size_t capacity = card.capacity_bytes(), page = page_bytes(is_small);
    const size_t num_bytes = pages::round_up(std::max(capacity + capacity / 8, size), page);
    char* start = pages::take_addresses(num_bytes);
    if (!start) {
      return nullptr;
    }
    auto* whole = new Block{start, num_bytes, 0, is_small, false, nullptr, nullptr, start, false};
    unmapped_of(is_small).insert(whole);
    return whole;
  }

  bool map_block(Block* block, size_t size) {
    const size_t before = block->ptr - block->expandable_segment;
    const size_t num_bytes = pages::round_up(before + size, page_bytes(block->is_small)) - before;
    if (!reserve(num_bytes)) {
      return false;
    }
    pages::map(block->ptr, num_bytes);
    unmapped_of(block->is_small).erase(block);
    block->mapped = true;
    ++stats_.num_device_alloc;
    add(stats_.reserved_bytes, block->is_small, static_cast<int64_t>(num_bytes));
    if (num_bytes < block->size) {
      unmapped_of(block->is_small).insert(cut(block, num_bytes, false));
    }
    merge_with_alike(block);
    pool_of(block->is_small).insert(block);
    return true;
  }

  // Gives back the pages that lie whole in a free block.
  void unmap_block(Block* block) {
    const size_t page = page_bytes(block->is_small), offset = block->ptr - block->expandable_segment;
    const size_t first = pages::round_up(offset, page), last = (offset + block->size) / page * page;
    if (last <= first) {
      return;
    }
    Pool& pool = pool_of(block->is_small);
    pool.erase(block);
    if (first > offset) {
      Block* before = block;
      block = cut(before, first - offset, true);
      pool.insert(before);
    }
    if (block->size > last - first) {
      pool.insert(cut(block, last - first, true));
    }
    pages::unmap(block->ptr, block->size);
    card.release(block->size);
    ++stats_.num_device_free;
    add(stats_.reserved_bytes, block->is_small, -static_cast<int64_t>(block->size));
    block->mapped = false;
    merge_with_alike(block);
    unmapped_of(block->is_small).insert(block);
  }

  void merge_with_alike(Block* block) {
    for (Block* neighbour : {block->prev, block->next}) {
      if (neighbour && !neighbour->allocated && neighbour->mapped == block->mapped) {
        merge(block, neighbour);
      }
    }
  }

  // CUDA's words, because programs match them: accelerate's find_executable_batch_size looks for "CUDA out of memory.".
  [[noreturn]] void raise_out_of_memory(size_t size, size_t alloc_size, size_t free_bytes) {
    ++stats_.num_ooms;
    const uint64_t allocated = stats_.allocated_bytes[0].current, reserved = stats_.reserved_bytes[0].current;
    c10::reportOutOfMemoryToProfiler(static_cast<int64_t>(size), allocated, reserved, kDevice);
    using c10::CachingAllocator::format_size;
    std::string processes, allowed = limit_bytes_ == UINT64_MAX ? "" : format_size(limit_bytes_) + " allowed; ";
    for (const auto& [pid, bytes] : card.bytes_by_process()) {
      processes += pid == getpid() ? "Including non-PyTorch memory, this process" : "Process " + std::to_string(pid);
      processes += " has " + format_size(bytes) + " memory in use. ";
    }
    TORCH_CHECK_WITH(
        OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", format_size(alloc_size),
        ". GPU 0 has a total capacity of ", format_size(card.capacity_bytes()), " of which ",
        format_size(free_bytes), " is free. ", processes, allowed, "Of the allocated memory ", format_size(allocated),
        " is allocated by PyTorch, and ", format_size(reserved - allocated),
        " is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting"
        " PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory Management "
        " (https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)");
    std::abort();  // not reached: TORCH_CHECK_WITH(false) throws, which the compiler does not know
  }

  void count_active(const Block& block, int64_t sign) {
    const auto size = static_cast<int64_t>(block.size);
    add(stats_.allocation, block.is_small, sign);
    add(stats_.allocated_bytes, block.is_small, sign * size);
    add(stats_.active, block.is_small, sign);
    add(stats_.active_bytes, block.is_small, sign * size);
    add(stats_.requested_bytes, block.is_small, sign * static_cast<int64_t>(block.requested_size));
    c10::reportMemoryUsageToProfiler(
        block.ptr, sign * size, stats_.allocated_bytes[0].current, stats_.reserved_bytes[0].current, kDevice);
  }

  static void add(StatArray& stats, bool is_small, int64_t amount) {
    using c10::CachingAllocator::StatType;
    for (StatType type : {StatType::AGGREGATE, is_small ? StatType::SMALL_POOL : StatType::LARGE_POOL}) {
      auto& stat = stats[static_cast<size_t>(type)];
      if (amount > 0) {
        stat.increase(static_cast<size_t>(amount));
      } else if (amount < 0) {
        stat.decrease(static_cast<size_t>(-amount));
      }
    }
  }

  template <class Function>
  void for_each_stat(Function function) {
    for (StatArray* stats :
         {&stats_.allocation, &stats_.segment, &stats_.active, &stats_.inactive_split, &stats_.allocated_bytes,
          &stats_.reserved_bytes, &stats_.active_bytes, &stats_.inactive_split_bytes, &stats_.requested_bytes}) {
      for (auto& stat : *stats) {
        function(stat);
      }
    }
  }

  std::mutex mutex_;
  Pool small_blocks_, large_blocks_;  // the cache
  Unmapped small_unmapped_, large_unmapped_;  // parts of expandable segments without memory
  bool expandable_segments_ = false;
  std::unordered_map<void*, Block*> allocated_blocks_;
  c10::CachingDeviceAllocator::DeviceStats stats_;
  std::atomic<uint64_t> num_allocations_{0}, allocations_until_failure_{0};
  std::atomic<uint64_t> limit_bytes_{UINT64_MAX};  // no limit
};

// Never destroyed: tensors in static storage are freed after main, and so after a static of ours would be.
inline DeviceAllocator& device_allocator() {
  static auto* allocator = new DeviceAllocator;
  return *allocator;
}

inline void free_device_memory(void* ptr) { device_allocator().free(ptr); }

}  // namespace simgpu
