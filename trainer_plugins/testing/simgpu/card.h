// The card file: the single truth about one simulated card, a small file that several processes map at once.
// trainer_plugins/testing/card.py has the same layout in Python and explains each field; keep the two in sync.
#pragma once

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>

namespace simgpu {

struct CardHeader {
  char magic[8];
  uint64_t capacity_bytes;
  char uuid[48];
};

struct CardSlot {
  int32_t pid;  // 0: the slot is free
  uint32_t flags;
  uint64_t bytes;
  char name[48];
};

constexpr char kCardMagic[] = "SIMCARD1";
constexpr uint32_t kSlotIsLive = 1;  // it counts while its process exists; without this it is scripted and always counts
constexpr int kNumSlots = 60;
constexpr size_t kCardFileBytes = 4096;

struct CardLayout {
  CardHeader header;
  CardSlot slots[kNumSlots];
};
static_assert(sizeof(CardHeader) == 64 && sizeof(CardSlot) == 64 && sizeof(CardLayout) <= kCardFileBytes);

class Card {
 public:
  // Maps the file and takes a slot for this process. The mapping of a card we had before stays: a thread may be
  // reading it.
  void attach(const char* path, const char* process_name) {
    const int fd = open(path, O_RDWR | O_CLOEXEC);
    TORCH_CHECK(fd >= 0, "simgpu: cannot open the card file ", path, ": ", std::strerror(errno));
    struct stat status {};
    const bool long_enough = fstat(fd, &status) == 0 && static_cast<size_t>(status.st_size) >= kCardFileBytes;
    void* memory = long_enough ? mmap(nullptr, kCardFileBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) : MAP_FAILED;
    close(fd);
    TORCH_CHECK(memory != MAP_FAILED, "simgpu: cannot map the card file ", path);
    auto* layout = static_cast<CardLayout*>(memory);
    TORCH_CHECK(std::memcmp(layout->header.magic, kCardMagic, 8) == 0, "simgpu: not a card file: ", path);
    own_slot_ = claim_slot(*layout, process_name);
    layout_ = layout;
  }

  // Takes num_bytes if they are free. Add first, look, and give back if it was too much: two processes that do so at
  // once may both be refused, never both be served.
  bool reserve(uint64_t num_bytes) {
    __atomic_add_fetch(&own_slot_->bytes, num_bytes, __ATOMIC_SEQ_CST);
    if (used_bytes() <= capacity_bytes()) {
      return true;
    }
    release(num_bytes);
    return false;
  }

  void release(uint64_t num_bytes) { __atomic_sub_fetch(&own_slot_->bytes, num_bytes, __ATOMIC_SEQ_CST); }

  uint64_t capacity_bytes() const { return __atomic_load_n(&layout_->header.capacity_bytes, __ATOMIC_SEQ_CST); }

  uint64_t used_bytes() const {
    uint64_t total = 0;
    for (const auto& [pid, bytes] : bytes_by_process()) {
      total += bytes;
    }
    return total;
  }

  uint64_t free_bytes() const {
    const uint64_t capacity = capacity_bytes(), used = used_bytes();
    return capacity > used ? capacity - used : 0;
  }

  std::map<int32_t, uint64_t> bytes_by_process() const {
    std::map<int32_t, uint64_t> result;
    for (const CardSlot& slot : layout_->slots) {
      const int32_t pid = __atomic_load_n(&slot.pid, __ATOMIC_SEQ_CST);
      if (pid != 0 && (!(slot.flags & kSlotIsLive) || exists(pid))) {
        result[pid] += __atomic_load_n(&slot.bytes, __ATOMIC_SEQ_CST);
      }
    }
    return result;
  }

 private:
  static bool exists(int32_t pid) { return pid == getpid() || kill(pid, 0) == 0 || errno == EPERM; }

  static CardSlot* claim_slot(CardLayout& layout, const char* process_name) {
    const int32_t self = getpid();
    for (CardSlot& slot : layout.slots) {
      int32_t seen = __atomic_load_n(&slot.pid, __ATOMIC_SEQ_CST);
      const bool live = slot.flags & kSlotIsLive;
      // Ours from before an exec or from a process that had our pid; free; or left behind by a process that died.
      const bool takeable = seen == 0 || (live && (seen == self || !exists(seen)));
      if (takeable && __atomic_compare_exchange_n(&slot.pid, &seen, self, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
        slot.flags = kSlotIsLive;
        std::memset(slot.name, 0, sizeof slot.name);
        std::strncpy(slot.name, process_name, sizeof slot.name - 1);
        __atomic_store_n(&slot.bytes, 0, __ATOMIC_SEQ_CST);
        return &slot;
      }
    }
    TORCH_CHECK(false, "simgpu: all ", kNumSlots, " process slots of the card file are taken");
  }

  CardLayout* layout_ = nullptr;
  CardSlot* own_slot_ = nullptr;
};

}  // namespace simgpu
