// libnccl: small data are really exchanged, through a file that the ranks of a communicator map; large data are only
// counted (with numbers nothing is that large). If rank 0 runs alone, it assumes that every other rank is like itself.
//
// A call returns when its work is done. Sends of a group go out before anything of it is waited for.
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#include "core.h"

namespace {

enum Result : int { kSuccess = 0, kSystemError = 2, kInvalidArgument = 4, kInvalidUsage = 5, kRemoteError = 6 };
enum Operation : int { kSum, kProduct, kMax, kMin, kAverage, kFirstOwn };
enum Kind : uint32_t { kAllReduce, kBroadcast, kReduce, kAllGather, kReduceScatter, kAllToAll, kSplit };
constexpr const char* kNames[] = {"AllReduce", "Broadcast", "Reduce", "AllGather", "ReduceScatter", "AlltoAll", "CommSplit"};

// For one rank's part of a collective, and for a message to one other. The file has holes where it is unused.
size_t largest_bytes() { return dry::kind().has_numbers ? 64 << 20 : dry::kind().largest_copy_bytes; }
size_t largest_message_bytes() { return dry::kind().has_numbers ? 16 << 20 : largest_bytes(); }
// Bytes are Python's objects (a checkpoint's plan), and come whole; of numbers without a value only a few are moved.
size_t largest_of(int type, size_t most) {
  const bool is_bytes = type == 0 || type == 1;
  return is_bytes || dry::kind().has_numbers ? most : std::min(most, size_t{256 << 10});
}
constexpr int kMessages = 8;  // that a sender may be ahead of its receiver
constexpr int64_t kPatienceNanoseconds = 600'000'000'000;

struct Id {
  char bytes[128];
};

// One rank's state, visible to the others. Only that rank writes it.
struct Shown {
  std::atomic<int32_t> pid;
  std::atomic<uint64_t> arrived, left;  // numbers of collectives
  uint32_t kind;
  int32_t type, operation, root;
  uint64_t count;
  alignas(16) char data[];
};

struct Channel {  // from one rank to another
  std::atomic<uint64_t> sent, received;
  char data[];
  char* message(uint64_t number) { return data + number % kMessages * largest_message_bytes(); }
};

struct Comm {
  int count, rank, device;
  Id id;
  uint64_t number = 0, num_splits = 0;
  char* file = nullptr;  // null: alone

  static size_t part_bytes() { return sizeof(Shown) + largest_bytes(); }
  static size_t channel_bytes() { return sizeof(Channel) + kMessages * largest_message_bytes(); }
  size_t file_bytes() const { return count * part_bytes() + count * count * channel_bytes(); }
  Shown& shown(int of) const { return *reinterpret_cast<Shown*>(file + of * part_bytes()); }
  Channel& channel(int from, int to) const {
    return *reinterpret_cast<Channel*>(file + count * part_bytes() + (from * count + to) * channel_bytes());
  }
};

// Data too large to exchange are only counted, and so have no numbers.
Result not_exchanged(size_t bytes, const char* name) {
  if (!dry::kind().has_numbers) return kSuccess;
  std::fprintf(stderr, "dry CUDA: %s of %zu bytes is larger than what is exchanged with numbers\n", name, bytes);
  return kInvalidUsage;
}

size_t size_of(int type) {
  constexpr size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};  // ncclInt8 to ncclFloat8e5m2, nccl.h
  return type >= 0 && type < 12 ? sizes[type] : 0;
}

// Waits for other ranks; false if one of them is gone or if this takes longer than any rank can need.
bool wait_until(const Comm& comm, const std::function<bool()>& is_so, const char* what) {
  const int64_t begun = dry::now_nanoseconds();
  for (uint64_t turn = 0; !is_so(); turn++) {
    if (turn < 1000) {
      sched_yield();
      continue;
    }
    usleep(turn < 3000 ? 50 : 1000);
    if (turn % 256 != 0) continue;
    for (int rank = 0; rank < comm.count; rank++) {
      const int32_t pid = comm.shown(rank).pid.load();
      if (pid != 0 && kill(pid, 0) != 0 && errno == ESRCH && !is_so()) {
        std::fprintf(stderr, "dry CUDA: rank %d ended while rank %d waited for it in %s\n", rank, comm.rank, what);
        return false;
      }
    }
    if (dry::now_nanoseconds() - begun > kPatienceNanoseconds) {
      std::fprintf(stderr, "dry CUDA: rank %d of %d has waited for ten minutes in %s\n", comm.rank, comm.count, what);
      return false;
    }
  }
  return true;
}

// ---- arithmetic -----------------------------------------------------------------------------------------------------

float from_bfloat16(uint16_t bits) {
  const uint32_t wide = uint32_t{bits} << 16;
  float number;
  std::memcpy(&number, &wide, sizeof number);
  return number;
}
uint16_t to_bfloat16(float number) {
  uint32_t wide;
  std::memcpy(&wide, &number, sizeof wide);
  return static_cast<uint16_t>((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16);
}

template <typename Stored, typename Number>
void combine(void* into, const void* with, size_t count, int operation, Number (*load)(Stored), Stored (*store)(Number)) {
  auto* a = static_cast<Stored*>(into);
  const auto* b = static_cast<const Stored*>(with);
  for (size_t i = 0; i < count; i++) {
    const Number x = load(a[i]), y = load(b[i]);
    switch (operation) {
      case kProduct: a[i] = store(x * y); break;
      case kMax: a[i] = store(x > y ? x : y); break;
      case kMin: a[i] = store(x < y ? x : y); break;
      default: a[i] = store(x + y);  // sums; an average is divided at the end
    }
  }
}
template <typename Number>
void combine(void* into, const void* with, size_t count, int operation) {
  combine<Number, Number>(into, with, count, operation, [](Number x) { return x; }, [](Number x) { return x; });
}

void combine(void* into, const void* with, size_t count, int type, int operation) {
  switch (type) {
    case 0: return combine<int8_t>(into, with, count, operation);
    case 1: return combine<uint8_t>(into, with, count, operation);
    case 2: return combine<int32_t>(into, with, count, operation);
    case 3: return combine<uint32_t>(into, with, count, operation);
    case 4: return combine<int64_t>(into, with, count, operation);
    case 5: return combine<uint64_t>(into, with, count, operation);
    case 6: return combine<_Float16>(into, with, count, operation);
    case 7: return combine<float>(into, with, count, operation);
    case 8: return combine<double>(into, with, count, operation);
    case 9: return combine<uint16_t, float>(into, with, count, operation, from_bfloat16, to_bfloat16);
    default: return;  // numbers of 8 bits
  }
}

template <typename Number>
void divide(void* all, size_t count, int by) {
  for (size_t i = 0; i < count; i++) static_cast<Number*>(all)[i] /= static_cast<Number>(by);
}
void divide(void* all, size_t count, int type, int by) {
  if (type == 6) divide<_Float16>(all, count, by);
  if (type == 7) divide<float>(all, count, by);
  if (type == 8) divide<double>(all, count, by);
  if (type == 9)
    for (size_t i = 0; i < count; i++) {
      auto& each = static_cast<uint16_t*>(all)[i];
      each = to_bfloat16(from_bfloat16(each) / by);
    }
}

// ---- collectives ----------------------------------------------------------------------------------------------------

struct Call {
  Comm* comm;
  Kind kind;
  const void* from;
  void* to;
  size_t count;  // elements that this rank gives
  int type, operation, root;
  size_t bytes() const { return count * size_of(type); }
};

// Gives the callers' parts to `take`, in the order of ranks.
Result exchange(const Call& call, const std::function<void(int, const char*)>& take) {
  Comm& comm = *call.comm;
  if (comm.file == nullptr) {
    for (int rank = 0; rank < comm.count; rank++) take(rank, static_cast<const char*>(call.from));
    return kSuccess;
  }
  const uint64_t number = ++comm.number;
  const auto all = [&](std::atomic<uint64_t> Shown::* at, uint64_t reached) {
    return [&comm, at, reached] {
      for (int rank = 0; rank < comm.count; rank++)
        if ((comm.shown(rank).*at).load(std::memory_order_acquire) < reached) return false;
      return true;
    };
  };
  const char* name = kNames[call.kind];
  if (!wait_until(comm, all(&Shown::left, number - 1), name)) return kRemoteError;
  Shown& own = comm.shown(comm.rank);
  own.kind = call.kind;
  own.type = call.type;
  own.operation = call.operation;
  own.root = call.root;
  own.count = call.count;
  std::memcpy(own.data, call.from, call.bytes());
  own.arrived.store(number, std::memory_order_release);
  if (!wait_until(comm, all(&Shown::arrived, number), name)) return kRemoteError;
  for (int rank = 0; rank < comm.count; rank++) {
    const Shown& its = comm.shown(rank);
    if (its.kind != own.kind || its.count != own.count || its.type != own.type || its.root != own.root) {
      std::fprintf(stderr, "dry CUDA: rank %d calls %s of %zu elements where rank %d calls %s of %zu\n", comm.rank, name,
                   size_t(own.count), rank, kNames[its.kind], size_t(its.count));
      return kInvalidUsage;
    }
  }
  for (int rank = 0; rank < comm.count; rank++) take(rank, comm.shown(rank).data);
  own.left.store(number, std::memory_order_release);
  return kSuccess;
}

Result run(const Call& call) {
  Comm& comm = *call.comm;
  dry::count(kNames[call.kind]);
  dry::count("bytes of collectives", call.bytes());
  if (call.bytes() > largest_of(call.type, largest_bytes())) return not_exchanged(call.bytes(), kNames[call.kind]);
  const size_t bytes = call.bytes();
  std::vector<char> result;
  // A reduction keeps only this rank's share of the result; all others keep whole parts.
  const size_t share = bytes / comm.count, count = call.count;
  const Result done = exchange(call, [&](int rank, const char* data) {
    switch (call.kind) {
      case kAllReduce:
      case kReduce:
      case kReduceScatter:
        if (rank == 0) result.assign(data, data + bytes);
        else combine(result.data(), data, count, call.type, call.operation);
        break;
      case kBroadcast:
        if (rank == call.root) result.assign(data, data + bytes);
        break;
      case kAllToAll:
        result.insert(result.end(), data + share * comm.rank, data + share * (comm.rank + 1));
        break;
      default: result.insert(result.end(), data, data + bytes);
    }
  });
  if (done != kSuccess) return done;
  if (call.operation == kAverage) divide(result.data(), count, call.type, comm.count);
  if (call.kind == kReduceScatter) std::memcpy(call.to, result.data() + share * comm.rank, share);
  else if (call.kind != kReduce || comm.rank == call.root) std::memcpy(call.to, result.data(), result.size());
  return kSuccess;
}

// ---- groups, and messages between two ranks --------------------------------------------------------------------------

thread_local int depth = 0;
thread_local std::vector<std::function<Result()>> sends, others;

Result done_or_queued(std::vector<std::function<Result()>>& queue, std::function<Result()> work) {
  if (depth == 0) return work();
  queue.push_back(std::move(work));
  return kSuccess;
}

Result send(Comm& comm, const void* data, size_t bytes, int type, int peer) {
  dry::count("Send");
  dry::count("bytes of collectives", bytes);
  if (bytes > largest_of(type, largest_message_bytes()) || comm.file == nullptr) return not_exchanged(bytes, "Send");
  Channel& way = comm.channel(comm.rank, peer);
  const uint64_t number = way.sent.load();
  if (!wait_until(comm, [&] { return number - way.received.load() < kMessages; }, "Send")) return kRemoteError;
  std::memcpy(way.message(number), data, bytes);
  way.sent.store(number + 1, std::memory_order_release);
  return kSuccess;
}

Result receive(Comm& comm, void* data, size_t bytes, int type, int peer) {
  dry::count("Recv");
  if (bytes > largest_of(type, largest_message_bytes()) || comm.file == nullptr) return not_exchanged(bytes, "Recv");
  Channel& way = comm.channel(peer, comm.rank);
  const uint64_t number = way.received.load();
  if (!wait_until(comm, [&] { return way.sent.load(std::memory_order_acquire) > number; }, "Recv")) return kRemoteError;
  std::memcpy(data, way.message(number), bytes);
  way.received.store(number + 1, std::memory_order_release);
  return kSuccess;
}

Result collective(Comm* comm, Kind kind, const void* from, void* to, size_t count, int type, int operation = kSum, int root = 0) {
  const Call call{comm, kind, from, to, count, type, operation >= kFirstOwn ? static_cast<int>(kSum) : operation, root};
  return done_or_queued(others, [call] { return run(call); });
}

// ---- communicators ---------------------------------------------------------------------------------------------------

Result join(Comm** made, int count, const Id& id, int rank) {
  auto* comm = new Comm{count, rank, dry::current_device(), id};
  *made = comm;
  if (count == 1 || dry::kind().alone) return kSuccess;
  std::string name = dry::folder() + "/nccl-";
  for (int at = 0; at < 16; at++) {
    char hex[3];
    std::snprintf(hex, sizeof hex, "%02x", static_cast<unsigned char>(id.bytes[at]));
    name += hex;
  }
  const size_t bytes = comm->file_bytes();
  const int file = open(name.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0) return kSystemError;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  close(file);
  if (memory == MAP_FAILED) return kSystemError;
  comm->file = static_cast<char*>(memory);
  comm->shown(rank).pid.store(getpid());
  const auto all_are_here = [&] {
    for (int other = 0; other < count; other++)
      if (comm->shown(other).pid.load() == 0) return false;
    return true;
  };
  return wait_until(*comm, all_are_here, "CommInitRank") ? kSuccess : kRemoteError;
}

}  // namespace

EXPORT Result ncclGetVersion(int* version) {
  *version = 22907;
  return kSuccess;
}
EXPORT Result ncclGetUniqueId(Id* id) {
  std::memset(id, 0, sizeof *id);
  const int file = open("/dev/urandom", O_RDONLY | O_CLOEXEC);
  const bool is_read = file >= 0 && read(file, id->bytes, 16) == 16;
  close(file);
  return is_read ? kSuccess : kSystemError;
}
EXPORT const char* ncclGetErrorString(Result result) {
  return result == kSuccess ? "no error" : result == kRemoteError ? "remote process exited or there was a network error" : "invalid usage";
}
EXPORT const char* ncclGetLastError(Comm*) { return ""; }
EXPORT Result ncclCommInitRank(Comm** made, int count, Id id, int rank) { return join(made, count, id, rank); }
EXPORT Result ncclCommInitRankConfig(Comm** made, int count, Id id, int rank, void*) { return join(made, count, id, rank); }
EXPORT Result ncclCommInitRankScalable(Comm** made, int count, int rank, int, Id* ids, void*) { return join(made, count, ids[0], rank); }
EXPORT Result ncclCommInitAll(Comm** made, int count, const int*) {
  Id id;
  ncclGetUniqueId(&id);
  for (int rank = 0; rank < count; rank++) made[rank] = new Comm{count, rank, rank, id};
  return kSuccess;
}
EXPORT Result ncclCommSplit(Comm* comm, int color, int key, Comm** made, void*) {
  const int64_t mine[2] = {color, key};
  std::vector<int64_t> all;
  const Result done = exchange({comm, kSplit, mine, nullptr, 2, 4, kSum, 0}, [&](int, const char* data) {
    const auto* its = reinterpret_cast<const int64_t*>(data);
    all.insert(all.end(), its, its + 2);
  });
  comm->num_splits++;
  *made = nullptr;
  if (done != kSuccess || color < 0) return done;
  // Ranks of one color, in the order of their keys.
  int count = 0, rank = 0;
  for (int other = 0; other < comm->count; other++) {
    if (all[2 * other] != color) continue;
    count++;
    const bool is_before = all[2 * other + 1] < key || (all[2 * other + 1] == key && other < comm->rank);
    rank += comm->file != nullptr && is_before;
  }
  Id id = comm->id;
  for (int at = 0; at < 8; at++) {
    id.bytes[at] ^= static_cast<char>(comm->num_splits >> (8 * (at % 4)));
    id.bytes[8 + at] ^= static_cast<char>((color + 1) * 0x9E3779B1u >> (8 * (at % 4)));
  }
  return join(made, count, id, rank);
}
EXPORT Result ncclCommCount(const Comm* comm, int* count) {
  *count = comm->count;
  return kSuccess;
}
EXPORT Result ncclCommUserRank(const Comm* comm, int* rank) {
  *rank = comm->rank;
  return kSuccess;
}
EXPORT Result ncclCommCuDevice(const Comm* comm, int* device) {
  *device = comm->device;
  return kSuccess;
}
EXPORT Result ncclCommGetAsyncError(Comm*, Result* error) {
  *error = kSuccess;
  return kSuccess;
}
EXPORT Result ncclCommFinalize(Comm*) { return kSuccess; }
EXPORT Result ncclCommDestroy(Comm*) { return kSuccess; }  // its memory is small, and others may still read the file
EXPORT Result ncclCommAbort(Comm*) { return kSuccess; }
EXPORT Result ncclCommRegister(const Comm*, void*, size_t, void** handle) {
  *handle = nullptr;
  return kSuccess;
}
EXPORT Result ncclCommDeregister(const Comm*, void*) { return kSuccess; }
EXPORT Result ncclMemAlloc(void** address, size_t num_bytes) {
  *address = dry::allocate(num_bytes, dry::current_device());
  return *address != nullptr ? kSuccess : kSystemError;
}
EXPORT Result ncclMemFree(void* address) { return dry::release(address) ? kSuccess : kInvalidArgument; }
EXPORT Result ncclRedOpCreatePreMulSum(int* operation, void*, int, int, Comm*) {
  if (dry::kind().has_numbers) {
    std::fprintf(stderr, "dry CUDA: a sum with a factor has no numbers\n");
    return kInvalidUsage;
  }
  *operation = kFirstOwn;
  return kSuccess;
}
EXPORT Result ncclRedOpDestroy(int, Comm*) { return kSuccess; }

EXPORT Result ncclGroupStart() {
  depth++;
  return kSuccess;
}
EXPORT Result ncclGroupEnd() {
  if (--depth > 0) return kSuccess;
  Result first = kSuccess;
  for (auto* queue : {&sends, &others}) {
    for (const auto& work : *queue)
      if (first == kSuccess) first = work();
    queue->clear();
  }
  return first;
}

EXPORT Result ncclAllReduce(const void* from, void* to, size_t count, int type, int operation, Comm* comm, void*) {
  return collective(comm, kAllReduce, from, to, count, type, operation);
}
EXPORT Result ncclReduce(const void* from, void* to, size_t count, int type, int operation, int root, Comm* comm, void*) {
  return collective(comm, kReduce, from, to, count, type, operation, root);
}
EXPORT Result ncclBroadcast(const void* from, void* to, size_t count, int type, int root, Comm* comm, void*) {
  return collective(comm, kBroadcast, from, to, count, type, kSum, root);
}
EXPORT Result ncclBcast(void* data, size_t count, int type, int root, Comm* comm, void* stream) {
  return ncclBroadcast(data, data, count, type, root, comm, stream);
}
EXPORT Result ncclAllGather(const void* from, void* to, size_t count, int type, Comm* comm, void*) {
  return collective(comm, kAllGather, from, to, count, type);
}
EXPORT Result ncclReduceScatter(const void* from, void* to, size_t count, int type, int operation, Comm* comm, void*) {
  return collective(comm, kReduceScatter, from, to, count * comm->count, type, operation);
}
EXPORT Result ncclAlltoAll(const void* from, void* to, size_t count, int type, Comm* comm, void*) {
  return collective(comm, kAllToAll, from, to, count * comm->count, type);
}
EXPORT Result ncclSend(const void* data, size_t count, int type, int peer, Comm* comm, void*) {
  const size_t bytes = count * size_of(type);
  return done_or_queued(sends, [=] { return send(*comm, data, bytes, type, peer); });
}
EXPORT Result ncclRecv(void* data, size_t count, int type, int peer, Comm* comm, void*) {
  const size_t bytes = count * size_of(type);
  return done_or_queued(others, [=] { return receive(*comm, data, bytes, type, peer); });
}
