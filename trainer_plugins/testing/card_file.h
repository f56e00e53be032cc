// The card file: the single truth about one simulated card, a small file that several processes map at once.
// card.py has the same layout in Python and explains each field; keep the two in sync.
#pragma once

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

namespace simcard {

struct Header {
  char magic[8];
  uint64_t capacity_bytes;
  char uuid[48];
};

struct Slot {
  int32_t pid;  // 0: the slot is free
  uint32_t flags;
  uint64_t bytes;
  char name[48];
};

constexpr char kMagic[] = "SIMCARD1";
constexpr uint32_t kSlotIsLive = 1;  // it counts while its process exists; without this it is scripted and always counts
constexpr int kNumSlots = 60;
constexpr size_t kFileBytes = 4096;

struct Layout {
  Header header;
  Slot slots[kNumSlots];
};
static_assert(sizeof(Header) == 64 && sizeof(Slot) == 64 && sizeof(Layout) <= kFileBytes);

class Card {
 public:
  // Maps the file and takes a slot for this process; says why not, or nothing. The mapping of a card we had before
  // stays: a thread may be reading it.
  std::string attach(const std::string& path, const std::string& process_name) {
    const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (fd < 0) return "cannot open the card file " + path + ": " + std::strerror(errno);
    struct stat status {};
    const bool long_enough = fstat(fd, &status) == 0 && static_cast<size_t>(status.st_size) >= kFileBytes;
    void* memory = long_enough ? mmap(nullptr, kFileBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) : MAP_FAILED;
    close(fd);
    if (memory == MAP_FAILED) return "cannot map the card file " + path;
    auto* layout = static_cast<Layout*>(memory);
    if (std::memcmp(layout->header.magic, kMagic, 8) != 0) return "not a card file: " + path;
    own_slot_ = claim_slot(*layout, process_name);
    if (own_slot_ == nullptr) return "all process slots of the card file are taken";
    layout_ = layout;
    return "";
  }

  // Takes num_bytes if they are free. Add first, look, and give back if it was too much: two processes that do so at
  // once may both be refused, never both be served.
  bool reserve(uint64_t num_bytes) {
    add(num_bytes);
    if (used_bytes() <= capacity_bytes()) return true;
    release(num_bytes);
    return false;
  }

  void add(uint64_t num_bytes) { __atomic_add_fetch(&own_slot_->bytes, num_bytes, __ATOMIC_SEQ_CST); }
  void release(uint64_t num_bytes) { __atomic_sub_fetch(&own_slot_->bytes, num_bytes, __ATOMIC_SEQ_CST); }

  uint64_t capacity_bytes() const { return __atomic_load_n(&layout_->header.capacity_bytes, __ATOMIC_SEQ_CST); }
  std::string uuid() const { return {layout_->header.uuid, strnlen(layout_->header.uuid, sizeof layout_->header.uuid)}; }

  uint64_t used_bytes() const {
    uint64_t total = 0;
    for (const auto& [pid, bytes] : bytes_by_process()) total += bytes;
    return total;
  }

  uint64_t free_bytes() const {
    const uint64_t capacity = capacity_bytes(), used = used_bytes();
    return capacity > used ? capacity - used : 0;
  }

  std::map<int32_t, uint64_t> bytes_by_process() const {
    std::map<int32_t, uint64_t> result;
    for (const Slot& slot : layout_->slots) {
      const int32_t pid = __atomic_load_n(&slot.pid, __ATOMIC_SEQ_CST);
      if (pid != 0 && (!(slot.flags & kSlotIsLive) || exists(pid))) {
        result[pid] += __atomic_load_n(&slot.bytes, __ATOMIC_SEQ_CST);
      }
    }
    return result;
  }

 private:
  static bool exists(int32_t pid) { return pid == getpid() || kill(pid, 0) == 0 || errno == EPERM; }

  static Slot* claim_slot(Layout& layout, const std::string& process_name) {
    const int32_t self = getpid();
    for (Slot& slot : layout.slots) {
      int32_t seen = __atomic_load_n(&slot.pid, __ATOMIC_SEQ_CST);
      const bool live = slot.flags & kSlotIsLive;
      // Ours from before an exec or from a process that had our pid; free; or left behind by a process that died.
      const bool takeable = seen == 0 || (live && (seen == self || !exists(seen)));
      if (takeable && __atomic_compare_exchange_n(&slot.pid, &seen, self, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
        slot.flags = kSlotIsLive;
        std::memset(slot.name, 0, sizeof slot.name);
        std::strncpy(slot.name, process_name.c_str(), sizeof slot.name - 1);
        __atomic_store_n(&slot.bytes, 0, __ATOMIC_SEQ_CST);
        return &slot;
      }
    }
    return nullptr;
  }

  Layout* layout_ = nullptr;
  Slot* own_slot_ = nullptr;
};

// The uuid of a card, read without taking a slot; empty if the file is no card.
inline std::string uuid_of(const std::string& path) {
  Header header{};
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return "";
  const bool is_read = read(fd, &header, sizeof header) == sizeof header && std::memcmp(header.magic, kMagic, 8) == 0;
  close(fd);
  return is_read ? std::string(header.uuid, strnlen(header.uuid, sizeof header.uuid)) : "";
}

}  // namespace simcard
