#include "core.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fstream>
#include <sstream>

#include "../../testing/card_file.h"
#include "addresses.h"

namespace dry {
namespace {

constexpr size_t kPageBytes = 2u << 20;  // cudaMalloc and cuMemCreate hand out such pages

size_t round_up(size_t number, size_t step) { return (number + step - 1) / step * step; }

[[noreturn]] void refuse(const std::string& why) {
  std::fprintf(stderr, "dry CUDA: %s\n", why.c_str());
  std::_Exit(1);
}

Kind read_kind() {
  Kind found;
  std::ifstream file(folder() + "/card.txt");
  if (!file) refuse("there is no card in " + folder());
  for (std::string line; std::getline(file, line);) {
    const size_t at = line.find('=');
    if (at == std::string::npos) continue;
    const std::string key = line.substr(0, at), text = line.substr(at + 1);
    const auto number = [&] { return std::strtoull(text.c_str(), nullptr, 10); };
    if (key == "name") found.name = text;
    else if (key == "major") found.major = number();
    else if (key == "minor") found.minor = number();
    else if (key == "multiprocessors") found.multiprocessors = number();
    else if (key == "l2_bytes") found.l2_bytes = number();
    else if (key == "shared_bytes") found.shared_bytes = number();
    else if (key == "shared_optin_bytes") found.shared_optin_bytes = number();
    else if (key == "max_threads") found.max_threads = number();
    else if (key == "context_bytes") found.context_bytes = number();
    else if (key == "has_numbers") found.has_numbers = number() != 0;
    else refuse("card.txt has an unknown key " + key);
  }
  if (found.has_numbers) found.largest_copy_bytes = SIZE_MAX;
  found.alone = std::getenv("TRAINER_PLUGINS_DRYCUDA_ALONE") != nullptr;
  return found;
}

// All cards of the folder: card-0, card-1, ...
std::vector<std::string> card_paths() {
  std::vector<std::string> found;
  for (int index = 0;; index++) {
    const std::string path = folder() + "/card-" + std::to_string(index);
    if (access(path.c_str(), F_OK) != 0) return found;
    found.push_back(path);
  }
}

std::string process_name() {
  std::ifstream file("/proc/self/cmdline");
  std::string text((std::istreambuf_iterator<char>(file)), {});
  std::replace(text.begin(), text.end(), '\0', ' ');
  return text;
}

// As CUDA reads CUDA_VISIBLE_DEVICES: indices or uuids up to the first that is wrong.
std::vector<std::string> visible_paths() {
  const std::vector<std::string> all = card_paths();
  const char* text = std::getenv("CUDA_VISIBLE_DEVICES");
  if (text == nullptr) return all;
  std::vector<std::string> found;
  std::stringstream words(text);
  for (std::string word; std::getline(words, word, ',');) {
    const size_t before = found.size();
    for (size_t index = 0; index < all.size(); index++) {
      const bool by_index = word == std::to_string(index);
      if (by_index || (word.rfind("GPU-", 0) == 0 && simcard::uuid_of(all[index]).rfind(word, 0) == 0)) {
        found.push_back(all[index]);
        break;
      }
    }
    if (found.size() == before) break;
  }
  return found;
}

struct Device {
  simcard::Card card;
  int slot = 0;  // its number on the machine
  std::atomic<bool> is_entered{false};
};

struct Devices {
  std::vector<Device*> all;
  Devices() {
    const std::string name = process_name();
    for (const std::string& path : visible_paths()) {
      auto* device = new Device;
      if (const std::string why = device->card.attach(path, name); !why.empty()) refuse(why);
      device->slot = std::stoi(path.substr(path.rfind('-') + 1));
      all.push_back(device);
    }
  }
};

Devices& devices() {
  static Devices* made = new Devices;
  return *made;
}

Device& device(int index) { return *devices().all.at(index); }

struct Block {
  size_t num_bytes;
  int device;
  bool is_counted;  // cudaMalloc counts here; cuMemCreate counts for itself
};

std::mutex blocks_lock, pinned_lock, counters_lock, streams_lock;
// Never destroyed: libraries free memory after this library's static objects would be gone.
auto& blocks = *new std::map<char*, Block>;
auto& pinned = *new std::map<char*, size_t>;
auto& counters = *new std::map<std::string, uint64_t>;
thread_local int current = 0;

}  // namespace

const std::string& folder() {
  static const std::string& found = *new std::string([] {
    const char* text = std::getenv("TRAINER_PLUGINS_DRYCUDA");
    if (text == nullptr) refuse("TRAINER_PLUGINS_DRYCUDA names no folder: start programs by trainer_plugins.drycuda");
    return text;
  }());
  return found;
}

const Kind& kind() {
  static const Kind& read = *new Kind(read_kind());
  return read;
}

int num_devices() { return static_cast<int>(devices().all.size()); }
int current_device() { return current; }

bool select_device(int index) {
  if (index < 0 || index >= num_devices()) return false;
  current = index;
  enter_device(index);
  return true;
}

void enter_device(int index) {
  Device& one = device(index);
  // A card that cannot hold the context is found full by the first allocation.
  if (!one.is_entered.exchange(true)) one.card.add(kind().context_bytes);
}

bool is_entered(int index) { return device(index).is_entered; }

size_t total_bytes(int index) { return device(index).card.capacity_bytes(); }

int pci_bus(int index) { return 0x17 + device(index).slot; }

size_t free_bytes(int index) {
  enter_device(index);
  return device(index).card.free_bytes();
}

std::string uuid_bytes(int index) {
  std::string digits, bytes;
  for (const char each : device(index).card.uuid().substr(4))  // GPU-
    if (each != '-') digits += each;
  for (size_t at = 0; at + 1 < digits.size(); at += 2)
    bytes += static_cast<char>(std::strtoul(digits.substr(at, 2).c_str(), nullptr, 16));
  bytes.resize(16);
  return bytes;
}

bool take(int index, size_t num_bytes) {
  enter_device(index);
  return device(index).card.reserve(num_bytes);
}

void give_back(int index, size_t num_bytes) { device(index).card.release(num_bytes); }

namespace {

void* mapped(void* at, size_t num_bytes, int flags) {
  return mmap(at, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | flags, -1, 0);
}

Addresses& addresses = *new Addresses;
std::mutex addresses_lock;

}  // namespace

void* reserve_addresses(size_t num_bytes) {
  std::lock_guard<std::mutex> guard(addresses_lock);
  void* wanted = reinterpret_cast<void*>(addresses.take(num_bytes));
  void* start = mapped(wanted, num_bytes, MAP_FIXED_NOREPLACE);
  if (start == wanted) return start;
  addresses.give_back(reinterpret_cast<uintptr_t>(wanted));
  if (start == MAP_FAILED) start = mapped(nullptr, num_bytes, 0);
  return start == MAP_FAILED ? nullptr : start;
}

void drop_addresses(void* start, size_t num_bytes) {
  std::lock_guard<std::mutex> guard(addresses_lock);
  addresses.give_back(reinterpret_cast<uintptr_t>(start));
  munmap(start, num_bytes);
}

void place(void* start, size_t num_bytes, int index) {
  std::lock_guard<std::mutex> guard(blocks_lock);
  blocks[static_cast<char*>(start)] = {num_bytes, index, false};
}

void unplace(void* start) {
  std::lock_guard<std::mutex> guard(blocks_lock);
  const auto found = blocks.find(static_cast<char*>(start));
  if (found == blocks.end()) return;
  madvise(start, found->second.num_bytes, MADV_DONTNEED);
  blocks.erase(found);
}

void unplace_all(void* start, size_t num_bytes) {
  std::lock_guard<std::mutex> guard(blocks_lock);
  auto* begin = static_cast<char*>(start);
  blocks.erase(blocks.lower_bound(begin), blocks.lower_bound(begin + num_bytes));
  madvise(start, num_bytes, MADV_DONTNEED);
}

void* allocate(size_t num_bytes, int index) {
  const size_t rounded = round_up(std::max<size_t>(num_bytes, 1), kPageBytes);
  if (!take(index, rounded)) return nullptr;
  void* start = reserve_addresses(rounded);
  if (start == nullptr) {
    give_back(index, rounded);
    return nullptr;
  }
  std::lock_guard<std::mutex> guard(blocks_lock);
  blocks[static_cast<char*>(start)] = {rounded, index, true};
  return start;
}

bool release(void* start) {
  std::lock_guard<std::mutex> guard(blocks_lock);
  const auto found = blocks.find(static_cast<char*>(start));
  if (found == blocks.end() || !found->second.is_counted) return false;
  drop_addresses(start, found->second.num_bytes);
  give_back(found->second.device, found->second.num_bytes);
  blocks.erase(found);
  return true;
}

int device_of(const void* address, void** start, size_t* num_bytes) {
  std::lock_guard<std::mutex> guard(blocks_lock);
  auto* at = static_cast<char*>(const_cast<void*>(address));
  auto found = blocks.upper_bound(at);
  if (found == blocks.begin()) return -1;
  --found;
  if (at >= found->first + found->second.num_bytes) return -1;
  if (start != nullptr) *start = found->first;
  if (num_bytes != nullptr) *num_bytes = found->second.num_bytes;
  return found->second.device;
}

void copy(void* to, const void* from, size_t num_bytes) {
  if (num_bytes == 0) return;
  const bool is_to_card = device_of(to) >= 0, is_from_card = device_of(from) >= 0;
  if (!is_to_card && !is_from_card) {
    std::memmove(to, from, num_bytes);
  } else if (num_bytes <= kind().largest_copy_bytes) {
    std::memmove(to, from, num_bytes);
    count("bytes copied", num_bytes);
  } else {
    // The host reads a large tensor's memory as it is: reading all of it would only cost pages.
    count("bytes not copied", num_bytes);
  }
}

void fill(void* to, int value, size_t num_bytes) {
  if (num_bytes <= kind().largest_copy_bytes) std::memset(to, value, num_bytes);
  else if (value == 0 && device_of(to) >= 0) {
    // Pages that were never written are zero: give back those that were.
    const static size_t page = sysconf(_SC_PAGESIZE);  // 64 KiB on some aarch64
    char *begin = static_cast<char*>(to), *end = begin + num_bytes;
    char* first = reinterpret_cast<char*>(round_up(reinterpret_cast<uintptr_t>(begin), page));
    char* last = reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(end) / page * page);
    std::memset(begin, 0, std::min(first, end) - begin);
    if (last > first) madvise(first, last - first, MADV_DONTNEED);
    if (end > last && last >= first) std::memset(last, 0, end - last);
  }
}

namespace {

size_t pinned_bytes = 0, most_pinned_bytes = 0;  // guarded by pinned_lock

void pin_more(size_t num_bytes) {
  pinned_bytes += num_bytes;
  most_pinned_bytes = std::max(most_pinned_bytes, pinned_bytes);
}

}  // namespace

void* pin(size_t num_bytes) {
  const size_t rounded = std::max<size_t>(num_bytes, 1);
  void* start = mapped(nullptr, rounded, 0);
  if (start == MAP_FAILED) return nullptr;
  std::lock_guard<std::mutex> guard(pinned_lock);
  pinned[static_cast<char*>(start)] = rounded;
  hold_pinned(start, rounded);
  pin_more(rounded);
  return start;
}

void unpin(void* start) {
  std::lock_guard<std::mutex> guard(pinned_lock);
  const auto found = pinned.find(static_cast<char*>(start));
  if (found == pinned.end()) return;
  munmap(start, found->second);
  pinned_bytes -= found->second;
  pinned.erase(found);
}

bool is_pinned(const void* address) {
  std::lock_guard<std::mutex> guard(pinned_lock);
  auto* at = static_cast<char*>(const_cast<void*>(address));
  auto found = pinned.upper_bound(at);
  if (found == pinned.begin()) return false;
  --found;
  return at < found->first + found->second;
}

void count(const char* name, uint64_t amount) {
  std::lock_guard<std::mutex> guard(counters_lock);
  counters[name] += amount;
}

std::atomic<bool> is_recording{false};
static auto& recorded = *new std::string;

void note(const char* what, void* handle, uint64_t number) {
  if (!is_recording) return;
  std::lock_guard<std::mutex> guard(counters_lock);
  recorded += std::string(what) + " " + std::to_string(stream(handle)->id) + " " + std::to_string(number) + "\n";
}

int unwritten(const char* library, const char* name) {
  std::lock_guard<std::mutex> guard(counters_lock);
  counters[std::string("unwritten ") + library + " " + name]++;
  return 0;
}

namespace {

std::atomic<uint64_t> next_stream{3}, next_capture{1};
auto& streams = *new std::vector<Stream*>;

}  // namespace

Stream* stream(void* handle) {
  // The legacy stream, the same by name (1), and the stream of the thread (2).
  static Stream* usual = new Stream{0, 0, 0, 0, 0};
  return reinterpret_cast<uintptr_t>(handle) <= 2 ? usual : static_cast<Stream*>(handle);
}

Stream* new_stream(unsigned flags, int priority) {
  auto* made = new Stream{current, priority, flags, next_stream++, 0};
  std::lock_guard<std::mutex> guard(streams_lock);
  streams.push_back(made);
  return made;
}

void end_stream(Stream* one) {
  std::lock_guard<std::mutex> guard(streams_lock);
  const auto found = std::find(streams.begin(), streams.end(), one);
  if (found == streams.end()) return;
  streams.erase(found);
  delete one;
}

uint64_t begin_capture(Stream* one) { return one->capture = next_capture++; }

void end_capture(Stream* one) {
  std::lock_guard<std::mutex> guard(streams_lock);
  const uint64_t ended = one->capture;
  one->capture = 0;
  for (Stream* other : streams)
    if (other->capture == ended) other->capture = 0;
}

void wait(Stream* one, const Event* event) {
  if (event->capture != 0) one->capture = event->capture;
}

int64_t now_nanoseconds() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

}  // namespace dry

// Called from Python. The text is a line for each counter, "NUMBER NAME"; it stays until the next call.
EXPORT const char* drycuda_counters() {
  static std::string& text = *new std::string;
  std::lock_guard<std::mutex> guard(dry::counters_lock);
  text.clear();
  text += std::to_string(dry::most_pinned_bytes) + " bytes pinned at most\n";
  for (const auto& [name, number] : dry::counters) text += std::to_string(number) + " " + name + "\n";
  return text.c_str();
}

// Records calls from now on; returns those since the last time, a line for each: "NAME STREAM NUMBER".
EXPORT const char* drycuda_record() {
  static std::string& text = *new std::string;
  std::lock_guard<std::mutex> guard(dry::counters_lock);
  dry::is_recording = true;
  text.swap(dry::recorded);
  dry::recorded.clear();
  return text.c_str();
}

// torch's Python module begins with a call of `initModule`: this one is found before torch's own. A Python that did not
// read the card's site folder (python -I, -E, -S) would go on as if the card, or the processor, were to train on.
static bool is_prepared = false;
EXPORT void drycuda_prepared() { is_prepared = true; }
EXPORT void* initModule() {
  if (!is_prepared) dry::refuse("this Python reads no sitecustomize (options -I, -E, -S, or a PYTHONPATH of its own)");
  void* torch = dlopen("libtorch_python.so", RTLD_NOW | RTLD_NOLOAD);
  auto* next = torch == nullptr ? nullptr : reinterpret_cast<void* (*)()>(dlsym(torch, "initModule"));
  if (next == nullptr || next == &initModule) dry::refuse("torch's Python module does not begin as it did until now");
  return next();
}

EXPORT int drycuda_count(const char* name) {
  dry::count(name);
  return 0;
}
EXPORT int drycuda_unwritten(const char* library, const char* name) { return dry::unwritten(library, name); }
