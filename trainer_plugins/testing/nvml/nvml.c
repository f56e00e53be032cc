/* A libnvidia-ml.so.1 that answers by a script, for programs that read NVIDIA cards on machines without any.
 *
 * It has the C interface of NVIDIA's library (nvml.h, https://docs.nvidia.com/deploy/nvml-api), so pynvml, nvitop,
 * gpustat and torch load it unchanged. Only functions that memory watchers call are here: a program that needs more
 * finds no such symbol, as with an old driver. `trainer_plugins.testing.nvml.ScriptedNvml` builds it and writes its script.
 *
 * The script is a text file, one record a line, fields separated by tabs. It is looked at (one stat) on every call and
 * read again when it has changed; whoever writes it replaces the file in one piece. Sizes are in bytes.
 *
 *   driver   version=580.95.05  cuda=13000  record_bytes=24
 *   card     uuid=GPU-...  name=...  bus=00000000:17:00.0  total=...  reserved=...  file=...
 *   slice    uuid=MIG-...  name=...  total=...               a MIG slice of the card above it
 *   process  pid=...  bytes=...  grow=...  flags=lug  name=...   on the card or slice above it: see Process
 *   hide     pid=...                                         `used` counts it, process lists leave it out
 *   fault    function=...  code=...  uuid=...  skip=...  times=...  hangs=1
 *
 * A card with a `file` takes uuid, size and processes from that card file, which the simulated accelerator shares: see
 * CardFile.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- the ABI of nvml.h ------------------------------------------------------------------------------------------- */

typedef enum {
  SUCCESS = 0,
  UNINITIALIZED = 1,
  INVALID_ARGUMENT = 2,
  NOT_SUPPORTED = 3,
  NOT_FOUND = 6,
  INSUFFICIENT_SIZE = 7,
  GPU_IS_LOST = 15,
  ARGUMENT_VERSION_MISMATCH = 25,
  UNKNOWN_ERROR = 999
} Return;

typedef struct { uint64_t total, free, used; } Memory; /* `used` includes the driver's own reserve */
typedef struct { uint32_t version; uint64_t total, reserved, free, used; } MemoryV2; /* `used` does not */
typedef struct { uint32_t gpu, memory; } Utilization;
typedef struct { uint32_t version, sensor; int32_t celsius; } TemperatureV1;
typedef struct { uint32_t version; unsigned char cluster[16]; Return status; uint32_t clique; uint8_t state; } FabricInfo;
typedef struct { char legacy_bus[16]; uint32_t domain, bus, device, device_id, subsystem_id; char bus_id[32]; } PciInfo;

/* One row of a process list. Version 1 of the call returns the first 16 bytes, versions 2 and 3 return 24. Drivers from
 * 535.43 to 535.86 returned 32 from version 3, with the confidential-computing bytes last, and readers that expected 24
 * read nonsense: gpustat #161, nvitop #88. `record_bytes=32` brings them back. */
typedef struct {
  uint32_t pid;
  uint64_t used;
  uint32_t gpu_instance, compute_instance;
  uint64_t protected_used;
} ProcessRecord;

#define MEMORY_V2_VERSION 0x02000028u     /* the size of MemoryV2, and 2 in the highest byte */
#define NOT_AVAILABLE UINT64_MAX          /* a process whose bytes the driver does not say */
#define NO_INSTANCE UINT32_MAX            /* a process that is not in a MIG slice */
_Static_assert(sizeof(MemoryV2) == 0x28, "nvmlMemory_v2_t is 40 bytes");
_Static_assert(sizeof(ProcessRecord) == 32 && sizeof(PciInfo) == 68, "the records are laid out as nvml.h has them");

/* ---- the card file ----------------------------------------------------------------------------------------------- */

enum { CARD_FILE_BYTES = 4096, CARD_FILE_SLOTS = 60, SLOT_IS_LIVE = 1 };

/* Memory shared with the simulated accelerator (trainer_plugins/testing/card.py), so that both speak of one card. */
typedef struct {
  char magic[8]; /* "SIMCARD1" */
  uint64_t capacity; /* for all processes together */
  char uuid[48];
  struct {
    int32_t pid; /* 0: nobody */
    uint32_t flags; /* SLOT_IS_LIVE: it counts only while the process exists */
    uint64_t bytes;
    char name[48];
  } slots[CARD_FILE_SLOTS];
} CardFile;
_Static_assert(sizeof(CardFile) <= CARD_FILE_BYTES, "the slots fit into the page");

/* ---- the script -------------------------------------------------------------------------------------------------- */

enum { MAX_CARDS = 64, MAX_SLICES = 7, MAX_PROCESSES = 256, MAX_HIDDEN = 64, MAX_FAULTS = 64 };
enum { TEXT = 128, PATH_TEXT = 1024 };

/* The target of a handle: a card, or a MIG slice of one. They live in fixed places, so that a handle survives a new
 * script; one whose device the new script no longer has says that the GPU is lost. */
typedef struct Device {
  bool present;
  struct Device *card; /* of a slice: the card it was cut from; of a card: NULL */
  int index; /* of a slice: among the slices of its card */
  char uuid[TEXT], name[TEXT], bus[TEXT];
  uint64_t total, reserved;
  int num_slices;
  uint64_t queries; /* how often its memory was asked for since the script was read */
  char file[PATH_TEXT];
  const CardFile *shared; /* `file`, once it has been opened */
} Device;

/* Flags: l, `live`: holds memory only while a process of that number exists. u, `unsaid`: the lists say N/A, as on WSL.
 * g, `graphics`: in the list of graphics, not of compute processes. */
typedef struct {
  const Device *device;
  uint32_t pid;
  uint64_t bytes, grow; /* `grow`: that much more with each query of the device's memory, so that no test has to wait */
  bool live, unsaid, graphics;
  char name[TEXT];
} Process;

typedef struct {
  char function[TEXT], uuid[TEXT]; /* no uuid: on every device */
  int code;
  bool hangs; /* it never answers */
  long skip, times; /* how many calls to let pass first, and how many to answer after that */
} Fault;

static struct {
  char driver[TEXT];
  int cuda, num_cards, num_processes, num_hidden, num_faults;
  size_t record_bytes;
  Device cards[MAX_CARDS], slices[MAX_CARDS][MAX_SLICES];
  Process processes[MAX_PROCESSES];
  uint32_t hidden[MAX_HIDDEN];
  Fault faults[MAX_FAULTS];
} script;

static char script_path[PATH_TEXT];
static struct stat script_read; /* the file as it was when it was last read */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int references; /* nvmlInit less nvmlShutdown */
static bool is_inherited; /* initialised by the parent of this process, which was forked */

/* A script that cannot be followed is a mistake in a test, and nothing that the test then says could be believed. */
static void refuse(const char *why, const char *what) {
  fprintf(stderr, "scripted libnvidia-ml: %s: %s\n", why, what);
  abort();
}

typedef struct { char *words[16]; int num_words; } Fields;

static const char *text(const Fields *fields, const char *key) {
  size_t length = strlen(key);
  for (int i = 1; i < fields->num_words; i++)
    if (!strncmp(fields->words[i], key, length) && fields->words[i][length] == '=')
      return fields->words[i] + length + 1;
  return "";
}

static uint64_t number(const Fields *fields, const char *key) { return strtoull(text(fields, key), NULL, 10); }

static void copy(char *target, size_t size, const char *source) {
  if ((size_t)snprintf(target, size, "%s", source) >= size) refuse("too long", source);
}

static void *next(void *array, size_t size, int *count, int max, const char *kind) {
  if (*count >= max) refuse("too many", kind);
  return (char *)array + size * (size_t)(*count)++;
}
#define NEXT(array, count, max) next(array, sizeof *(array), &(count), max, #array)

static void read_device(Device *device, const Fields *fields) {
  device->present = true;
  copy(device->uuid, TEXT, text(fields, "uuid"));
  copy(device->name, TEXT, text(fields, "name"));
  copy(device->bus, TEXT, text(fields, "bus"));
  copy(device->file, PATH_TEXT, text(fields, "file"));
  device->total = number(fields, "total");
  device->reserved = number(fields, "reserved");
}

/* Returns the device that the processes of the next records are on. */
static Device *read_record(const Fields *fields, Device *current) {
  const char *kind = fields->words[0];
  Device *card = current && current->card ? current->card : current;
  if (!strcmp(kind, "driver")) {
    copy(script.driver, TEXT, text(fields, "version"));
    script.cuda = (int)number(fields, "cuda");
    script.record_bytes = (size_t)number(fields, "record_bytes");
  } else if (!strcmp(kind, "card")) {
    current = NEXT(script.cards, script.num_cards, MAX_CARDS);
    current->index = script.num_cards - 1;
    read_device(current, fields);
  } else if (!strcmp(kind, "slice") && card) {
    current = NEXT(script.slices[card->index], card->num_slices, MAX_SLICES);
    current->card = card;
    current->index = card->num_slices - 1;
    read_device(current, fields);
  } else if (!strcmp(kind, "process") && current) {
    Process *process = NEXT(script.processes, script.num_processes, MAX_PROCESSES);
    process->device = current;
    process->pid = (uint32_t)number(fields, "pid");
    process->bytes = number(fields, "bytes");
    process->grow = number(fields, "grow");
    process->live = strchr(text(fields, "flags"), 'l');
    process->unsaid = strchr(text(fields, "flags"), 'u');
    process->graphics = strchr(text(fields, "flags"), 'g');
    copy(process->name, TEXT, text(fields, "name"));
  } else if (!strcmp(kind, "hide")) {
    *(uint32_t *)NEXT(script.hidden, script.num_hidden, MAX_HIDDEN) = (uint32_t)number(fields, "pid");
  } else if (!strcmp(kind, "fault")) {
    Fault *fault = NEXT(script.faults, script.num_faults, MAX_FAULTS);
    copy(fault->function, TEXT, text(fields, "function"));
    copy(fault->uuid, TEXT, text(fields, "uuid"));
    fault->code = (int)number(fields, "code");
    fault->hangs = *text(fields, "hangs");
    fault->skip = (long)number(fields, "skip");
    fault->times = *text(fields, "times") ? (long)number(fields, "times") : -1;
  } else {
    refuse("cannot read the record", kind);
  }
  return current;
}

static void forget_script(void) {
  for (int i = 0; i < script.num_cards; i++)
    if (script.cards[i].shared) munmap((void *)script.cards[i].shared, CARD_FILE_BYTES);
  memset(&script, 0, sizeof script);
}

static bool unchanged(const struct stat *now) {
  return now->st_ino == script_read.st_ino && now->st_dev == script_read.st_dev &&
         now->st_size == script_read.st_size && now->st_mtim.tv_sec == script_read.st_mtim.tv_sec &&
         now->st_mtim.tv_nsec == script_read.st_mtim.tv_nsec;
}

static void read_script_if_changed(void) {
  if (!*script_path) {
    const char *path = getenv("TRAINER_PLUGINS_NVML_SCRIPT");
    if (!path) refuse("no script", "set TRAINER_PLUGINS_NVML_SCRIPT, as ScriptedNvml.env() does");
    copy(script_path, PATH_TEXT, path);
  }
  struct stat now;
  if (stat(script_path, &now)) refuse("cannot read the script", script_path);
  if (unchanged(&now)) return;
  FILE *file = fopen(script_path, "r");
  if (!file || fstat(fileno(file), &now)) refuse("cannot read the script", script_path);
  forget_script();
  char line[4 * PATH_TEXT], *rest;
  Device *current = NULL;
  while (fgets(line, sizeof line, file)) {
    Fields fields = {.num_words = 0};
    char *word = strtok_r(line, "\t\n", &rest);
    for (; word && fields.num_words < 16; word = strtok_r(NULL, "\t\n", &rest)) fields.words[fields.num_words++] = word;
    if (fields.num_words) current = read_record(&fields, current);
  }
  fclose(file);
  script_read = now;
}

/* ---- a call ------------------------------------------------------------------------------------------------------ */

/* NULL while there is no such file or it is no card file: the card is then lost. */
static const CardFile *card_file(Device *device) {
  if (device->shared) return device->shared;
  int descriptor = open(device->file, O_RDONLY | O_CLOEXEC);
  struct stat status;
  if (descriptor < 0) return NULL;
  if (!fstat(descriptor, &status) && status.st_size >= CARD_FILE_BYTES) {
    void *page = mmap(NULL, CARD_FILE_BYTES, PROT_READ, MAP_SHARED, descriptor, 0);
    if (page != MAP_FAILED && !memcmp(page, "SIMCARD1", 8)) device->shared = page;
    else if (page != MAP_FAILED) munmap(page, CARD_FILE_BYTES);
  }
  close(descriptor);
  return device->shared;
}

static bool there(Device *device) { return device->present && (!*device->file || card_file(device)); }

static const char *uuid_of(Device *device) {
  if (!*device->file || !card_file(device)) return device->uuid;
  snprintf(device->uuid, TEXT, "%.48s", card_file(device)->uuid);
  return device->uuid;
}

static bool is_ours(const Device *device) {
  const Device *slices = &script.slices[0][0];
  return (device >= script.cards && device < script.cards + MAX_CARDS) ||
         (device >= slices && device < slices + MAX_CARDS * MAX_SLICES);
}

static Return injected(const char *function, Device *device) {
  for (int i = 0; i < script.num_faults; i++) {
    Fault *fault = &script.faults[i];
    if (strcmp(fault->function, function)) continue;
    if (*fault->uuid && (!device || strcmp(fault->uuid, uuid_of(device)))) continue;
    if (fault->skip > 0) fault->skip--;
    else if (fault->times) {
      if (fault->times > 0) fault->times--;
      if (fault->hangs) pthread_mutex_unlock(&lock);
      while (fault->hangs) pause();
      return (Return)fault->code;
    }
  }
  return SUCCESS;
}

/* Every call begins here and ends in leave(). */
static void enter(void) {
  pthread_mutex_lock(&lock);
  read_script_if_changed();
}

static Return leave(Return result) {
  pthread_mutex_unlock(&lock);
  return result;
}

static Return allowed(const char *function, Device *device) {
  if (!references) return is_inherited ? UNKNOWN_ERROR : UNINITIALIZED;
  Return result = injected(function, device);
  return result != SUCCESS || !device || there(device) ? result : GPU_IS_LOST;
}

static Return enter_system(const char *function) {
  enter();
  return allowed(function, NULL);
}

static Return enter_device(const char *function, Device *device) {
  enter();
  return is_ours(device) ? allowed(function, device) : INVALID_ARGUMENT;
}

/* NVIDIA does not document an initialised library's state in a forked child. Here it is of no use until the child
 * initialises it for itself, and does not say that it wants that: the harder case. */
static void before_fork(void) { pthread_mutex_lock(&lock); }
static void after_fork_in_parent(void) { pthread_mutex_unlock(&lock); }
static void after_fork_in_child(void) {
  references = 0;
  is_inherited = true;
  pthread_mutex_unlock(&lock);
}
__attribute__((constructor)) static void prepare_for_fork(void) {
  pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

/* Not NVIDIA's: follow the script at this path from now on, whatever the environment says. */
void scriptedNvmlFollow(const char *path) {
  pthread_mutex_lock(&lock);
  copy(script_path, PATH_TEXT, path);
  memset(&script_read, 0, sizeof script_read);
  pthread_mutex_unlock(&lock);
}

/* ---- who holds memory -------------------------------------------------------------------------------------------- */

enum { MAX_HOLDERS = MAX_PROCESSES + CARD_FILE_SLOTS };

typedef struct {
  uint32_t pid;
  uint64_t bytes;
  bool unsaid, graphics;
  const Device *slice;
  char name[TEXT];
} Holder;

static bool exists(uint32_t pid) { return !kill((pid_t)pid, 0) || errno == EPERM; }

static int holders(Device *device, Holder found[MAX_HOLDERS]) {
  int count = 0;
  const CardFile *shared = *device->file ? card_file(device) : NULL;
  for (int i = 0; shared && i < CARD_FILE_SLOTS; i++) {
    uint32_t pid = (uint32_t)shared->slots[i].pid;
    if (!pid || !shared->slots[i].bytes) continue; /* a driver lists who has a context */
    if ((shared->slots[i].flags & SLOT_IS_LIVE) && !exists(pid)) continue;
    /* A process may have two slots, simgpu's own and a test's addition; a driver lists it once. */
    int place = 0;
    while (place < count && found[place].pid != pid) place++;
    if (place == count) {
      found[count] = (Holder){.pid = pid};
      memcpy(found[count++].name, shared->slots[i].name, sizeof shared->slots[i].name); /* may fill its field: no NUL */
    }
    found[place].bytes += shared->slots[i].bytes;
  }
  uint64_t growths = device->queries ? device->queries - 1 : 0; /* the first query sees the script's value */
  for (int i = 0; i < script.num_processes; i++) {
    const Process *process = &script.processes[i];
    bool on_device = process->device == device || process->device->card == device; /* a card has its slices' too */
    if (!on_device || (process->live && !exists(process->pid))) continue;
    found[count] = (Holder){.pid = process->pid, .bytes = process->bytes + process->grow * growths,
                            .unsaid = process->unsaid, .graphics = process->graphics,
                            .slice = process->device->card ? process->device : NULL};
    copy(found[count++].name, TEXT, process->name);
  }
  return count;
}

static MemoryV2 memory_of(Device *device) {
  Holder found[MAX_HOLDERS];
  device->queries++;
  int count = holders(device, found);
  uint64_t capacity = *device->file ? card_file(device)->capacity : device->total - device->reserved, used = 0;
  for (int i = 0; i < count; i++) used += found[i].bytes;
  if (used > capacity) used = capacity; /* no card holds more than it has */
  return (MemoryV2){.version = MEMORY_V2_VERSION, .total = capacity + device->reserved, .reserved = device->reserved,
                    .used = used, .free = capacity - used};
}

static bool hidden(uint32_t pid) {
  for (int i = 0; i < script.num_hidden; i++)
    if (script.hidden[i] == pid) return true;
  return false;
}

/* Called with *count = 0 to learn the length, then with room for it: nvml.h. */
static Return list(Device *device, bool graphics, size_t record_bytes, uint32_t *count, char *records) {
  Holder found[MAX_HOLDERS];
  uint32_t room = *count;
  int num_found = holders(device, found);
  *count = 0;
  for (int i = 0; i < num_found; i++) {
    if (found[i].graphics != graphics || hidden(found[i].pid)) continue;
    ProcessRecord record = {.pid = found[i].pid, .used = found[i].unsaid ? NOT_AVAILABLE : found[i].bytes,
                            .gpu_instance = found[i].slice ? (uint32_t)found[i].slice->index + 1 : NO_INSTANCE,
                            .compute_instance = found[i].slice ? 0 : NO_INSTANCE};
    if (records && *count < room) memcpy(records + *count * record_bytes, &record, record_bytes);
    ++*count;
  }
  return *count > room ? INSUFFICIENT_SIZE : SUCCESS;
}

/* ---- the library ------------------------------------------------------------------------------------------------- */

static Return write_text(char *target, uint32_t size, const char *source) {
  return (uint32_t)snprintf(target, size, "%s", source) < size ? SUCCESS : INSUFFICIENT_SIZE;
}

/* SYSTEM(name, (parameters), code) and DEVICE(name, (Device *device, ...), code): a function that runs its code once it
 * may. The code sees `result` and may set it. */
#define CALL(function, parameters, begin, ...) \
  Return function parameters { \
    Return result = begin; \
    if (result == SUCCESS) { __VA_ARGS__ } \
    return leave(result); \
  }
#define SYSTEM(function, parameters, ...) CALL(function, parameters, enter_system(__func__), __VA_ARGS__)
#define DEVICE(function, parameters, ...) CALL(function, parameters, enter_device(__func__, device), __VA_ARGS__)

static Return initialize(const char *function) {
  enter();
  Return result = injected(function, NULL);
  if (result == SUCCESS) {
    references++;
    is_inherited = false;
  }
  return leave(result);
}
Return nvmlInitWithFlags(uint32_t flags) { return (void)flags, initialize(__func__); } /* for pynvml */
Return nvmlInit_v2(void) { return initialize(__func__); }
Return nvmlInit(void) { return initialize(__func__); } /* for torch */
SYSTEM(nvmlShutdown, (void), references--;)

/* pynvml asks only for the text of codes that it does not know. */
const char *nvmlErrorString(Return code) { return (void)code, "Scripted Error"; }

SYSTEM(nvmlSystemGetDriverVersion, (char *version, uint32_t size), result = write_text(version, size, script.driver);)
SYSTEM(nvmlSystemGetNVMLVersion, (char *version, uint32_t size), result = write_text(version, size, script.driver);)
SYSTEM(nvmlSystemGetCudaDriverVersion, (int *version), *version = script.cuda;)
SYSTEM(nvmlSystemGetCudaDriverVersion_v2, (int *version), *version = script.cuda;)
SYSTEM(nvmlSystemGetProcessName, (uint32_t pid, char *name, uint32_t size), {
  result = NOT_FOUND;
  Holder found[MAX_HOLDERS];
  for (int card = 0; card < script.num_cards && result == NOT_FOUND; card++)
    for (int i = holders(&script.cards[card], found) - 1; i >= 0 && result == NOT_FOUND; i--)
      if (found[i].pid == pid && *found[i].name) result = write_text(name, size, found[i].name);
})

SYSTEM(nvmlDeviceGetCount_v2, (uint32_t *count), *count = (uint32_t)script.num_cards;)
SYSTEM(nvmlDeviceGetCount, (uint32_t *count), *count = (uint32_t)script.num_cards;)

/* A fault on one uuid holds for the looking up of that device too. */
static Return hand_out(const char *function, Device *found, Return otherwise, Device **device) {
  Return result = allowed(function, found);
  if (result == SUCCESS && !found) result = otherwise;
  if (result == SUCCESS) *device = found;
  return leave(result);
}

static Return by_index(const char *function, uint32_t index, Device **device) {
  enter();
  return hand_out(function, index < (uint32_t)script.num_cards ? &script.cards[index] : NULL, INVALID_ARGUMENT, device);
}
Return nvmlDeviceGetHandleByIndex_v2(uint32_t index, Device **device) { return by_index(__func__, index, device); }
Return nvmlDeviceGetHandleByIndex(uint32_t index, Device **device) { return by_index(__func__, index, device); }

/* By the whole of it: CUDA takes a prefix, NVML does not (vLLM #51677). */
Return nvmlDeviceGetHandleByUUID(const char *uuid, Device **device) {
  enter();
  Device *found = NULL;
  for (int i = 0; i < script.num_cards; i++) {
    if (!strcmp(uuid, uuid_of(&script.cards[i]))) found = &script.cards[i];
    for (int j = 0; j < script.cards[i].num_slices; j++)
      if (!strcmp(uuid, script.slices[i][j].uuid)) found = &script.slices[i][j];
  }
  return hand_out(__func__, found, NOT_FOUND, device);
}

static PciInfo pci_of(const char *bus_id) {
  PciInfo info = {.device_id = 0x233010DE};
  if (sscanf(bus_id, "%x:%x:%x", &info.domain, &info.bus, &info.device) != 3) info.bus = UINT32_MAX;
  uint32_t bus = info.bus & 0xff, slot = info.device & 0xff;
  snprintf(info.legacy_bus, sizeof info.legacy_bus, "%04X:%02X:%02X.0", info.domain & 0xffff, bus, slot);
  snprintf(info.bus_id, sizeof info.bus_id, "%08X:%02X:%02X.0", info.domain, bus, slot);
  return info;
}

Return nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, Device **device) {
  enter();
  Device *found = NULL;
  PciInfo wanted = pci_of(bus_id);
  for (int i = 0; i < script.num_cards; i++)
    if (!strcmp(wanted.bus_id, pci_of(script.cards[i].bus).bus_id)) found = &script.cards[i];
  return hand_out(__func__, found, NOT_FOUND, device);
}

DEVICE(nvmlDeviceGetIndex, (Device *device, uint32_t *index), *index = (uint32_t)device->index;)
DEVICE(nvmlDeviceGetUUID, (Device *device, char *uuid, uint32_t size), {
  result = write_text(uuid, size, uuid_of(device));
})
DEVICE(nvmlDeviceGetName, (Device *device, char *name, uint32_t size), result = write_text(name, size, device->name);)
DEVICE(nvmlDeviceGetPciInfo_v3, (Device *device, PciInfo *info), {
  *info = pci_of((device->card ? device->card : device)->bus);
})

DEVICE(nvmlDeviceGetMemoryInfo, (Device *device, Memory *info), {
  MemoryV2 memory = memory_of(device);
  *info = (Memory){.total = memory.total, .free = memory.free, .used = memory.used + memory.reserved};
})
DEVICE(nvmlDeviceGetMemoryInfo_v2, (Device *device, MemoryV2 *info), {
  if (info->version == MEMORY_V2_VERSION) *info = memory_of(device);
  else result = ARGUMENT_VERSION_MISMATCH;
})

#define PROCESS_LIST(function, graphics, record_bytes) \
  DEVICE(function, (Device *device, uint32_t *count, void *records), { \
    result = list(device, graphics, record_bytes, count, records); \
  })
PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses, false, 16)
PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses_v2, false, 24)
PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses_v3, false, script.record_bytes)
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses, true, 16)
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses_v2, true, 24)
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses_v3, true, script.record_bytes)

DEVICE(nvmlDeviceIsMigDeviceHandle, (Device *device, uint32_t *is_slice), *is_slice = device->card != NULL;)
DEVICE(nvmlDeviceGetMigMode, (Device *device, uint32_t *current, uint32_t *pending), {
  if (device->card) result = NOT_SUPPORTED;
  else *current = *pending = device->num_slices > 0;
})
DEVICE(nvmlDeviceGetMaxMigDeviceCount, (Device *device, uint32_t *count), *count = device->num_slices ? MAX_SLICES : 0;)
DEVICE(nvmlDeviceGetMigDeviceHandleByIndex, (Device *device, uint32_t index, Device **slice), {
  if (device->card || index >= MAX_SLICES) result = INVALID_ARGUMENT;
  else if (index >= (uint32_t)device->num_slices) result = NOT_FOUND;
  else *slice = &script.slices[device->index][index];
})
DEVICE(nvmlDeviceGetDeviceHandleFromMigDeviceHandle, (Device *device, Device **card), {
  if (device->card) *card = device->card;
  else result = INVALID_ARGUMENT;
})
DEVICE(nvmlDeviceGetGpuInstanceId, (Device *device, uint32_t *id), {
  if (device->card) *id = (uint32_t)device->index + 1;
  else result = NOT_SUPPORTED;
})
DEVICE(nvmlDeviceGetComputeInstanceId, (Device *device, uint32_t *id), {
  if (device->card) *id = 0;
  else result = NOT_SUPPORTED;
})

/* Other figures of monitors: a card at rest. */
DEVICE(nvmlDeviceGetUtilizationRates, (Device *device, Utilization *rates), {
  if (device->card || device->num_slices) result = NOT_SUPPORTED; /* as with MIG enabled */
  else *rates = (Utilization){0, 0};
})
DEVICE(nvmlDeviceGetTemperature, (Device *device, int sensor, uint32_t *celsius), (void)sensor; *celsius = 40;)
DEVICE(nvmlDeviceGetTemperatureV, (Device *device, TemperatureV1 *temperature), temperature->celsius = 40;)
DEVICE(nvmlDeviceGetPowerUsage, (Device *device, uint32_t *milliwatts), *milliwatts = 100000;)
DEVICE(nvmlDeviceGetEnforcedPowerLimit, (Device *device, uint32_t *milliwatts), *milliwatts = 700000;)
DEVICE(nvmlDeviceGetPowerManagementLimit, (Device *device, uint32_t *milliwatts), *milliwatts = 700000;)
DEVICE(nvmlDeviceGetPerformanceState, (Device *device, int *state), *state = 0;)
DEVICE(nvmlDeviceGetPersistenceMode, (Device *device, int *mode), *mode = 1;)
/* torch asks it of cards of capability 9 for expandable segments: this card is in no fabric. */
DEVICE(nvmlDeviceGetGpuFabricInfoV, (Device *device, FabricInfo *info), info->state = 0;)
DEVICE(nvmlDeviceGetComputeMode, (Device *device, int *mode), *mode = 0;)
DEVICE(nvmlDeviceGetCudaComputeCapability, (Device *device, int *major, int *minor), *major = 9; *minor = 0;)

DEVICE(nvmlDeviceGetEncoderUtilization, (Device *device, uint32_t *percent, uint32_t *period), *percent = *period = 0;)
DEVICE(nvmlDeviceGetDecoderUtilization, (Device *device, uint32_t *percent, uint32_t *period), *percent = *period = 0;)
DEVICE(nvmlDeviceGetBAR1MemoryInfo, (Device *device, Memory *info), {
  *info = (Memory){.total = 1ull << 37, .free = 1ull << 37, .used = 0};
})

/* Every driver has these, so clients call them unguarded (nvitop prints a traceback for each that is missing), and many
 * cards do not know the answer. */
#define UNKNOWN(function) \
  DEVICE(function, (Device *device, void *first, void *second), { \
    (void)first, (void)second; \
    result = NOT_SUPPORTED; \
  })
UNKNOWN(nvmlDeviceGetClockInfo)
UNKNOWN(nvmlDeviceGetMaxClockInfo)
UNKNOWN(nvmlDeviceGetFanSpeed)
UNKNOWN(nvmlDeviceGetDisplayActive)
UNKNOWN(nvmlDeviceGetDisplayMode)
UNKNOWN(nvmlDeviceGetDriverModel_v2)
UNKNOWN(nvmlDeviceGetPcieThroughput)
UNKNOWN(nvmlDeviceGetProcessUtilization)
UNKNOWN(nvmlDeviceGetTotalEccErrors)
/* torch wants these as soon as it is out of memory (c10/cuda/driver_api.h) or looks for peers. */
UNKNOWN(nvmlDeviceGetNvLinkRemoteDeviceType)
UNKNOWN(nvmlDeviceGetNvLinkRemotePciInfo_v2)
UNKNOWN(nvmlDeviceGetP2PStatus)
/* nvitop tells by these two how long a process record is: where the first is there and not the second, 32 bytes
 * (nvitop/api/libnvml.py). pynvml 13.615.71 raises TypeError when the second says N/A, so ask it nothing. */
UNKNOWN(nvmlDeviceGetConfComputeMemSizeInfo)
UNKNOWN(nvmlDeviceGetRunningProcessDetailList)
