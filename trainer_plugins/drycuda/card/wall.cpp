// Stands before libc where the kernel gives a command no namespaces (namespaces.py). Writing, renaming
// and deleting outside a few folders fails with EROFS before it happens, and connecting to a port on
// which no process of this run listens fails with ECONNREFUSED. The file `refused` lists each.
//
// A program that would not load this library, because it is static or setuid, is not started.

#include <arpa/inet.h>
#include <dirent.h>
#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))
#define REAL(name)                                                                              \
  ([] {                                                                                        \
    static auto* const found = reinterpret_cast<decltype(&name)>(dlsym(RTLD_NEXT, #name));      \
    return found;                                                                              \
  }())

namespace {

const std::string& variable(const char* name) {
  static thread_local std::string found;
  const char* text = std::getenv(name);
  found = text == nullptr ? "" : text;
  return found;
}

// Read once for each run: a program may change its environment, but not its permissions.
struct Wall {
  std::string folder;
  std::vector<std::string> real;
  std::vector<std::string> kept;  // of the environment: the dry card's libraries, and their variables
  bool has_network;
  Wall() : folder(variable("TRAINER_PLUGINS_DRYCUDA")), has_network(variable("TRAINER_PLUGINS_DRY_NETWORK") == "1") {
    const std::string all = variable("TRAINER_PLUGINS_DRY_WALL");
    for (size_t at = 0, end; at < all.size(); at = end + 1) {
      end = std::min(all.find(':', at), all.size());
      real.push_back(all.substr(at, end - at));
    }
    for (char** each = environ; *each != nullptr; each++)
      if (std::strncmp(*each, "LD_PRELOAD=", 11) == 0 || std::strncmp(*each, "TRAINER_PLUGINS_DRY", 19) == 0)
        kept.push_back(*each);
  }
};

Wall& wall() {
  static Wall& made = *new Wall;
  return made;
}

void note(const char* what, const std::string& of) {
  const int saved = errno;
  const int file = REAL(open)((wall().folder + "/refused").c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  if (file >= 0) {
    const std::string line = std::string(what) + " " + of + "\n";
    if (write(file, line.data(), line.size()) < 0) {}
    close(file);
  }
  errno = saved;
}

// The path without links, `..` and a folder's descriptor; its last part may be missing.
std::string resolved(int folder, const char* path, bool follows) {
  std::string full = path;
  if (full.empty() || full[0] != '/') {
    char start[PATH_MAX];
    if (folder == AT_FDCWD) {
      if (getcwd(start, sizeof start) == nullptr) return full;
    } else {
      const ssize_t size = readlink(("/proc/self/fd/" + std::to_string(folder)).c_str(), start, sizeof start - 1);
      if (size < 0) return full;
      start[size] = 0;
    }
    full = std::string(start) + "/" + full;
  }
  std::string missing;
  char found[PATH_MAX];
  if (!follows) {
    while (full.size() > 1 && full.back() == '/') full.pop_back();
    const size_t at = full.rfind('/');
    missing = full.substr(at);
    full = full.substr(0, at) + "/";
  }
  while (!full.empty() && realpath(full.c_str(), found) == nullptr) {
    while (full.size() > 1 && full.back() == '/') full.pop_back();
    const size_t at = full.rfind('/');
    missing = full.substr(at) + missing;
    full = full.substr(0, at);
  }
  const std::string whole = (full.empty() || std::string(found) == "/" ? "" : found) + missing;
  // A missing part can have `..` only where nothing could be created.
  return missing.find("/..") == std::string::npos ? whole : "/..";
}

bool is_below(const std::string& path, const std::string& folder) {
  return path == folder || (path.rfind(folder, 0) == 0 && path[folder.size()] == '/');
}

// False, EROFS and a note if the named file may not be changed.
bool may_change(int folder, const char* path, bool follows = false) {
  if (path == nullptr) return true;  // libc reports the error
  const std::string whole = resolved(folder, path, follows);
  for (const char* own : {"/dev", "/proc"})
    if (is_below(whole, own)) return true;
  for (const std::string& each : wall().real)
    if (is_below(whole, each)) return true;
  note("write", whole);
  errno = EROFS;
  return false;
}

constexpr int kWrites = O_WRONLY | O_RDWR | O_CREAT | O_TRUNC | O_APPEND;

bool may_open(int folder, const char* path, int flags) {
  if ((flags & kWrites) == 0) return true;
  // A program may open a file that it only reads with more rights than it needs: nothing is lost.
  return may_change(folder, path, (flags & (O_NOFOLLOW | O_EXCL)) == 0);
}

bool may_open(const char* path, const char* mode) {
  return std::strpbrk(mode, "wa+") == nullptr || may_change(AT_FDCWD, path, true);
}

mode_t mode_in(int flags, va_list words) { return (flags & (O_CREAT | O_TMPFILE)) ? va_arg(words, mode_t) : 0; }

std::string port_file(int port) { return wall().folder + "/port-" + std::to_string(port); }

int port_of(const sockaddr* to) {
  if (to->sa_family == AF_INET) return ntohs(reinterpret_cast<const sockaddr_in*>(to)->sin_port);
  return ntohs(reinterpret_cast<const sockaddr_in6*>(to)->sin6_port);
}

std::string name_of(const sockaddr* to) {
  char text[INET6_ADDRSTRLEN] = "?";
  if (to->sa_family == AF_INET) inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in*>(to)->sin_addr, text, sizeof text);
  else inet_ntop(AF_INET6, &reinterpret_cast<const sockaddr_in6*>(to)->sin6_addr, text, sizeof text);
  return std::string(text) + " port " + std::to_string(port_of(to));
}

// An address of this machine is one that a socket can be bound to.
bool is_own_host(const sockaddr* to) {
  sockaddr_storage own{};
  const bool is_v4 = to->sa_family == AF_INET;
  std::memcpy(&own, to, is_v4 ? sizeof(sockaddr_in) : sizeof(sockaddr_in6));
  (is_v4 ? reinterpret_cast<sockaddr_in*>(&own)->sin_port : reinterpret_cast<sockaddr_in6*>(&own)->sin6_port) = 0;
  const int tried = socket(to->sa_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  const bool is_own = bind(tried, reinterpret_cast<sockaddr*>(&own), sizeof own) == 0;
  close(tried);
  return is_own;
}

// Whether an address is one that a process of this run listens on.
bool may_reach(const sockaddr* to) {
  if (to == nullptr || wall().has_network) return true;
  if (to->sa_family == AF_UNIX) {
    const char* path = reinterpret_cast<const sockaddr_un*>(to)->sun_path;
    if (path[0] == 0) return true;  // abstract: torch and multiprocessing use these among themselves
    const std::string whole = resolved(AT_FDCWD, path, true);
    for (const std::string& each : wall().real)
      if (is_below(whole, each)) return true;
    note("connect", whole);
  } else if (to->sa_family == AF_INET || to->sa_family == AF_INET6) {
    if (is_own_host(to) && access(port_file(port_of(to)).c_str(), F_OK) == 0) return true;
    note("connect", name_of(to));
  } else {
    return true;
  }
  errno = ECONNREFUSED;
  return false;
}

// Whether a program will load this library: it is no script of its own, static or setuid program.
bool may_start(const char* path) {
  if (path == nullptr || std::strchr(path, '/') == nullptr) return true;
  struct stat about;
  if (stat(path, &about) != 0) return true;
  const int file = REAL(open)(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return true;
  Elf64_Ehdr head{};
  bool is_elf = pread(file, &head, sizeof head, 0) == sizeof head && std::memcmp(head.e_ident, ELFMAG, SELFMAG) == 0;
  bool is_dynamic = !is_elf;
  for (int at = 0; is_elf && at < head.e_phnum; at++) {
    Elf64_Phdr part{};
    if (pread(file, &part, sizeof part, head.e_phoff + at * sizeof part) != sizeof part) break;
    is_dynamic = is_dynamic || part.p_type == PT_INTERP;
  }
  close(file);
  const std::string whole = resolved(AT_FDCWD, path, true);
  const bool only_lists = whole.size() > 9 && whole.compare(whole.size() - 9, 9, "/ldconfig") == 0;
  const bool gains = (about.st_mode & (S_ISUID | S_ISGID)) != 0;
  if ((is_dynamic && !gains) || only_lists) return true;
  note("start", whole);
  errno = EACCES;
  return false;
}

// The environment, with the libraries of the dry card if a program takes them away (`env -i`).
struct Environment {
  std::vector<std::string> texts;
  std::vector<char*> all;
  explicit Environment(char* const* given) {
    for (char* const* each = given; each != nullptr && *each != nullptr; each++)
      if (std::strncmp(*each, "LD_PRELOAD=", 11) != 0 && std::strncmp(*each, "TRAINER_PLUGINS_DRY", 19) != 0)
        texts.push_back(*each);
    texts.insert(texts.end(), wall().kept.begin(), wall().kept.end());
    for (std::string& each : texts) all.push_back(each.data());
    all.push_back(nullptr);
  }
};

// As execvp finds a program.
std::string found_in_path(const char* name) {
  if (std::strchr(name, '/') != nullptr) return name;
  const std::string path = variable("PATH");
  for (size_t at = 0, end; at <= path.size(); at = end + 1) {
    end = std::min(path.find(':', at), path.size());
    const std::string found = path.substr(at, end - at) + "/" + name;
    if (access(found.c_str(), X_OK) == 0) return found;
  }
  return name;
}

std::vector<char*> words_of(const char* first, va_list words) {
  std::vector<char*> all{const_cast<char*>(first)};
  while (all.back() != nullptr) all.push_back(va_arg(words, char*));
  return all;
}

}  // namespace

// Loaded at the start, before the program can change its environment.
__attribute__((constructor)) static void read_wall() { wall(); }
// Called in a process that was forked for a run, and has its environment.
EXPORT void drywall_read() { wall() = Wall(); }

#define OPEN(name)                                              \
  EXPORT int name(const char* path, int flags, ...) {           \
    va_list words;                                              \
    va_start(words, flags);                                     \
    const mode_t mode = mode_in(flags, words);                  \
    va_end(words);                                              \
    return may_open(AT_FDCWD, path, flags) ? REAL(name)(path, flags, mode) : -1; \
  }
#define OPENAT(name)                                            \
  EXPORT int name(int folder, const char* path, int flags, ...) { \
    va_list words;                                              \
    va_start(words, flags);                                     \
    const mode_t mode = mode_in(flags, words);                  \
    va_end(words);                                              \
    return may_open(folder, path, flags) ? REAL(name)(folder, path, flags, mode) : -1; \
  }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)
EXPORT int creat(const char* path, mode_t mode) { return may_change(AT_FDCWD, path, true) ? REAL(creat)(path, mode) : -1; }
EXPORT int creat64(const char* path, mode_t mode) { return may_change(AT_FDCWD, path, true) ? REAL(creat64)(path, mode) : -1; }
EXPORT FILE* fopen(const char* path, const char* mode) { return may_open(path, mode) ? REAL(fopen)(path, mode) : nullptr; }
EXPORT FILE* fopen64(const char* path, const char* mode) { return may_open(path, mode) ? REAL(fopen64)(path, mode) : nullptr; }
EXPORT FILE* freopen(const char* path, const char* mode, FILE* file) {
  return path == nullptr || may_open(path, mode) ? REAL(freopen)(path, mode, file) : nullptr;
}
EXPORT FILE* freopen64(const char* path, const char* mode, FILE* file) {
  return path == nullptr || may_open(path, mode) ? REAL(freopen64)(path, mode, file) : nullptr;
}

EXPORT int unlink(const char* path) noexcept { return may_change(AT_FDCWD, path) ? REAL(unlink)(path) : -1; }
EXPORT int unlinkat(int folder, const char* path, int flags) noexcept { return may_change(folder, path) ? REAL(unlinkat)(folder, path, flags) : -1; }
EXPORT int remove(const char* path) noexcept { return may_change(AT_FDCWD, path) ? REAL(remove)(path) : -1; }
EXPORT int rmdir(const char* path) noexcept { return may_change(AT_FDCWD, path) ? REAL(rmdir)(path) : -1; }
EXPORT int mkdir(const char* path, mode_t mode) noexcept {
  struct stat about;  // queried by `makedirs(exist_ok=True)`
  if (path != nullptr && stat(path, &about) == 0) { errno = EEXIST; return -1; }
  return may_change(AT_FDCWD, path) ? REAL(mkdir)(path, mode) : -1;
}
EXPORT int mkdirat(int folder, const char* path, mode_t mode) noexcept { return may_change(folder, path) ? REAL(mkdirat)(folder, path, mode) : -1; }
EXPORT int rename(const char* from, const char* to) noexcept {
  return may_change(AT_FDCWD, from) && may_change(AT_FDCWD, to) ? REAL(rename)(from, to) : -1;
}
EXPORT int renameat(int a, const char* from, int b, const char* to) noexcept {
  return may_change(a, from) && may_change(b, to) ? REAL(renameat)(a, from, b, to) : -1;
}
EXPORT int renameat2(int a, const char* from, int b, const char* to, unsigned flags) noexcept {
  return may_change(a, from) && may_change(b, to) ? REAL(renameat2)(a, from, b, to, flags) : -1;
}
EXPORT int link(const char* from, const char* to) noexcept {
  return may_change(AT_FDCWD, from) && may_change(AT_FDCWD, to) ? REAL(link)(from, to) : -1;
}
EXPORT int linkat(int a, const char* from, int b, const char* to, int flags) noexcept {
  return may_change(a, from) && may_change(b, to) ? REAL(linkat)(a, from, b, to, flags) : -1;
}
EXPORT int symlink(const char* from, const char* to) noexcept { return may_change(AT_FDCWD, to) ? REAL(symlink)(from, to) : -1; }
EXPORT int symlinkat(const char* from, int b, const char* to) noexcept { return may_change(b, to) ? REAL(symlinkat)(from, b, to) : -1; }
EXPORT int truncate(const char* path, off_t size) noexcept { return may_change(AT_FDCWD, path, true) ? REAL(truncate)(path, size) : -1; }
EXPORT int truncate64(const char* path, off64_t size) noexcept { return may_change(AT_FDCWD, path, true) ? REAL(truncate64)(path, size) : -1; }
EXPORT int chmod(const char* path, mode_t mode) noexcept { return may_change(AT_FDCWD, path, true) ? REAL(chmod)(path, mode) : -1; }
EXPORT int fchmodat(int folder, const char* path, mode_t mode, int flags) noexcept {
  return may_change(folder, path, true) ? REAL(fchmodat)(folder, path, mode, flags) : -1;
}
EXPORT int mkfifo(const char* path, mode_t mode) noexcept { return may_change(AT_FDCWD, path) ? REAL(mkfifo)(path, mode) : -1; }
EXPORT int mknod(const char* path, mode_t mode, dev_t device) noexcept { return may_change(AT_FDCWD, path) ? REAL(mknod)(path, mode, device) : -1; }

EXPORT int listen(int socket, int waiting) noexcept {
  sockaddr_storage own{};
  socklen_t size = sizeof own;
  const int done = REAL(listen)(socket, waiting);
  if (done == 0 && getsockname(socket, reinterpret_cast<sockaddr*>(&own), &size) == 0 &&
      (own.ss_family == AF_INET || own.ss_family == AF_INET6)) {
    const std::string file = port_file(port_of(reinterpret_cast<sockaddr*>(&own)));
    close(REAL(open)(file.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
  }
  return done;
}
// libc asks other hosts for a name by functions that do not pass here.
EXPORT int getaddrinfo(const char* name, const char* service, const addrinfo* hints, addrinfo** found) {
  char own[HOST_NAME_MAX + 1] = "";
  in6_addr number;
  gethostname(own, sizeof own - 1);
  const bool is_known = name == nullptr || wall().has_network || std::strcmp(name, "localhost") == 0 ||
                        std::strcmp(name, own) == 0 || inet_pton(AF_INET, name, &number) == 1 ||
                        std::strchr(name, ':') != nullptr;
  if (is_known) return REAL(getaddrinfo)(name, service, hints, found);
  note("connect", name);
  return EAI_AGAIN;
}
EXPORT int connect(int socket, const sockaddr* to, socklen_t size) { return may_reach(to) ? REAL(connect)(socket, to, size) : -1; }
EXPORT ssize_t sendto(int socket, const void* bytes, size_t number, int flags, const sockaddr* to, socklen_t size) {
  return may_reach(to) ? REAL(sendto)(socket, bytes, number, flags, to, size) : -1;
}
EXPORT ssize_t sendmsg(int socket, const msghdr* message, int flags) {
  return may_reach(static_cast<const sockaddr*>(message->msg_name)) ? REAL(sendmsg)(socket, message, flags) : -1;
}

EXPORT int execve(const char* path, char* const* words, char* const* given) noexcept {
  return may_start(path) ? REAL(execve)(path, words, Environment(given).all.data()) : -1;
}
EXPORT int execv(const char* path, char* const* words) noexcept { return execve(path, words, environ); }
EXPORT int execvpe(const char* name, char* const* words, char* const* given) noexcept {
  return may_start(found_in_path(name).c_str()) ? REAL(execvpe)(name, words, Environment(given).all.data()) : -1;
}
EXPORT int execvp(const char* name, char* const* words) noexcept { return execvpe(name, words, environ); }
EXPORT int execl(const char* path, const char* first, ...) noexcept {
  va_list words;
  va_start(words, first);
  const std::vector<char*> all = words_of(first, words);
  va_end(words);
  return execve(path, all.data(), environ);
}
EXPORT int execlp(const char* name, const char* first, ...) noexcept {
  va_list words;
  va_start(words, first);
  const std::vector<char*> all = words_of(first, words);
  va_end(words);
  return execvpe(name, all.data(), environ);
}
EXPORT int posix_spawn(pid_t* pid, const char* path, const posix_spawn_file_actions_t* actions,
                       const posix_spawnattr_t* how, char* const* words, char* const* given) {
  return may_start(path) ? REAL(posix_spawn)(pid, path, actions, how, words, Environment(given).all.data()) : EACCES;
}
EXPORT int posix_spawnp(pid_t* pid, const char* name, const posix_spawn_file_actions_t* actions,
                        const posix_spawnattr_t* how, char* const* words, char* const* given) {
  return may_start(found_in_path(name).c_str())
             ? REAL(posix_spawnp)(pid, name, actions, how, words, Environment(given).all.data())
             : EACCES;
}
