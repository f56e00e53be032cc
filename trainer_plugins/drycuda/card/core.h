// The dry card: state shared by the CUDA runtime, the driver, NCCL and the maths libraries of this folder in a process.
//
// Device memory is address space of the host that costs nothing until it is written; kernels are counted and not run.
// Everything is complete as soon as it is asked for, so streams and events only have to remember their order.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "abi.h"

namespace dry {

// One kind of card, as `Card` in __init__.py writes it into $TRAINER_PLUGINS_DRYCUDA/card.txt.
struct Kind {
  std::string name = "Dry CUDA";
  int major = 9, minor = 0, multiprocessors = 132, driver = CUDA_MAJOR * 1000;
  size_t l2_bytes = 50u << 20, shared_optin_bytes = 227u << 10, shared_bytes = 228u << 10;
  size_t max_threads = 2048, context_bytes = 0, largest_copy_bytes = 4u << 20;
  bool has_numbers = false;  // every operator is computed, and copies are complete
  bool alone = false;  // $TRAINER_PLUGINS_DRYCUDA_ALONE: rank 0 runs, and answers for all others
};

const Kind& kind();
const std::string& folder();  // $TRAINER_PLUGINS_DRYCUDA

// Devices are numbered as CUDA_VISIBLE_DEVICES leaves them.
int num_devices();
int current_device();
bool select_device(int device);
int pci_bus(int device);
size_t total_bytes(int device);
size_t free_bytes(int device);
std::string uuid_bytes(int device);  // 16 bytes, as the driver has them
bool take(int device, size_t num_bytes);
void give_back(int device, size_t num_bytes);
// The context of a process is taken from the card with its first use of the device.
void enter_device(int device);
bool is_entered(int device);

// Memory with an address.
void* reserve_addresses(size_t num_bytes);  // null if the process may have no more
void drop_addresses(void* start, size_t num_bytes);
void place(void* start, size_t num_bytes, int device);
void unplace(void* start);
void unplace_all(void* start, size_t num_bytes);  // every block that begins in this range
void* allocate(size_t num_bytes, int device);  // null: the card is full
bool release(void* start);
// The device of an address; -1 if it is the host's.
int device_of(const void* address, void** start = nullptr, size_t* num_bytes = nullptr);
void copy(void* to, const void* from, size_t num_bytes);
void fill(void* to, int value, size_t num_bytes);

// Pinned memory of the host.
void* pin(size_t num_bytes);
void unpin(void* start);
bool is_pinned(const void* address);
void hold_pinned(void* start, size_t num_bytes);  // counts it as main memory, until it is unmapped

// Counters. `name` must live as long as the process.
void count(const char* name, uint64_t amount = 1);
extern std::atomic<bool> is_recording;
// Notes a call of a stream while calls are recorded: its name, the stream, and a number of bytes or of an event.
void note(const char* what, void* stream, uint64_t number);
// Counts a function that has no code of its own, and returns 0.
int unwritten(const char* library, const char* name);

// Streams, events and captures of graphs.
struct Stream {
  int device, priority;
  unsigned flags;
  uint64_t id, capture;
};
struct Event {
  uint64_t capture;
  int64_t nanoseconds;
  uint64_t number;  // of the call that recorded it last
};
Stream* stream(void* handle);  // the default streams too
Stream* new_stream(unsigned flags, int priority);
void end_stream(Stream* stream);
uint64_t begin_capture(Stream* stream);
void end_capture(Stream* stream);
// The stream's next work comes after the event, and belongs to its capture.
void wait(Stream* stream, const Event* event);
int64_t now_nanoseconds();

}  // namespace dry
