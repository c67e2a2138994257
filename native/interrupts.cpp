#include "interrupts.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <mutex>

namespace cinetile {
namespace {

// Atomic: the __atomic built-ins read and write these two.
int64_t last_started = 0;
int64_t last_ended = 0;

// All below is guarded by the mutex, but for what the handler reads: `previous` and `write_end`
// are set before the handler is installed.
std::mutex mutex;
int64_t num_calls = 0;
bool installed = false;
struct sigaction previous;
int read_end = -1;
int write_end = -1;

void on_interrupt(int number, siginfo_t* info, void* context) {
  const int error = errno;
  // First, so that Python knows of the signal before any call ends for it.
  if ((previous.sa_flags & SA_SIGINFO) != 0)
    previous.sa_sigaction(number, info, context);
  else
    previous.sa_handler(number);
  const int64_t news = __atomic_load_n(&last_started, __ATOMIC_RELAXED);
  [[maybe_unused]] const ssize_t written = write(write_end, &news, sizeof(news));
  errno = error;
}

bool calls_nothing(const struct sigaction& action) {
  return (action.sa_flags & SA_SIGINFO) == 0 &&
         (action.sa_handler == SIG_DFL || action.sa_handler == SIG_IGN);
}

bool is_ours(const struct sigaction& action) {
  return (action.sa_flags & SA_SIGINFO) != 0 && action.sa_sigaction == on_interrupt;
}

void install() {
  if (installed || write_end < 0) return;
  struct sigaction present;
  if (sigaction(SIGINT, nullptr, &present) != 0 || calls_nothing(present) || is_ours(present))
    return;
  previous = present;
  struct sigaction action = present;
  action.sa_sigaction = on_interrupt;
  action.sa_flags |= SA_SIGINFO;
  installed = sigaction(SIGINT, &action, nullptr) == 0;
}

void uninstall() {
  if (!installed) return;
  installed = false;
  struct sigaction present;
  // Whoever installed another handler meanwhile keeps it.
  if (sigaction(SIGINT, nullptr, &present) == 0 && is_ours(present))
    sigaction(SIGINT, &previous, nullptr);
}

void close_pipe() {
  if (read_end >= 0) close(read_end);
  if (write_end >= 0) close(write_end);
  read_end = write_end = -1;
}

// A forked child has none of its parent's calls, threads or news.
void start_over_in_child() {
  num_calls = 0;
  uninstall();
  close_pipe();
  mutex.unlock();
}

bool follow_forks() {
  return pthread_atfork([] { mutex.lock(); }, [] { mutex.unlock(); }, start_over_in_child) == 0;
}

}  // namespace

const int64_t* last_ended_call() { return &last_ended; }

void end_calls(int64_t last) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (last > last_ended) __atomic_store_n(&last_ended, last, __ATOMIC_RELAXED);
}

int watch_interrupts() {
  static const bool follows = follow_forks();
  if (!follows) return -1;
  const std::lock_guard<std::mutex> lock(mutex);
  if (read_end >= 0) return read_end;
  int ends[2];
  if (pipe(ends) != 0) return -1;
  for (const int end : ends) fcntl(end, F_SETFD, FD_CLOEXEC);
  fcntl(ends[1], F_SETFL, O_NONBLOCK);  // a handler must not wait
  read_end = ends[0];
  write_end = ends[1];
  return read_end;
}

RunningCall::RunningCall() {
  const std::lock_guard<std::mutex> lock(mutex);
  number_ = __atomic_add_fetch(&last_started, 1, __ATOMIC_RELAXED);
  ++num_calls;
  install();
}

RunningCall::~RunningCall() {
  const std::lock_guard<std::mutex> lock(mutex);
  if (--num_calls == 0) uninstall();
}

void RunningCall::throw_if_interrupted() const {
  if (__atomic_load_n(&last_ended, __ATOMIC_RELAXED) >= number_) throw Interrupted();
}

}  // namespace cinetile
