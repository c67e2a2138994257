#include "parallel.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>

namespace cinetile {
namespace {

// Outlives the call if a scheduled thread wakes up late; such a thread finds nothing to take and
// never touches `task`, which belongs to the caller.
struct Progress {
  Progress(int64_t num_tasks, const std::function<void(int64_t)>& task)
      : num_tasks(num_tasks), task(task) {}

  void work() {
    for (;;) {
      const int64_t index = next.fetch_add(1);
      if (index >= num_tasks) return;
      if (!failed.load(std::memory_order_relaxed)) {
        try {
          task(index);
        } catch (...) {
          const std::lock_guard<std::mutex> lock(mutex);
          if (!failed.exchange(true)) error = std::current_exception();
        }
      }
      if (done.fetch_add(1) + 1 == num_tasks) {
        const std::lock_guard<std::mutex> lock(mutex);
        all_done.notify_one();
      }
    }
  }

  void wait() {
    std::unique_lock<std::mutex> lock(mutex);
    all_done.wait(lock, [this] { return done.load() == num_tasks; });
  }

  const int64_t num_tasks;
  const std::function<void(int64_t)>& task;
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> done{0};
  std::atomic<bool> failed{false};
  std::mutex mutex;
  std::condition_variable all_done;
  std::exception_ptr error;
};

}  // namespace

void parallel_for(Threads& threads, int64_t num_tasks, const std::function<void(int64_t)>& task) {
  if (num_tasks < 1) return;
  const auto progress = std::make_shared<Progress>(num_tasks, task);
  const int64_t helpers = std::min(threads.count(), num_tasks) - 1;
  try {
    for (int64_t i = 0; i < helpers; ++i) threads.schedule([progress] { progress->work(); });
  } catch (...) {
    // Those that could not be asked are not needed: the caller does what is left.
  }
  progress->work();
  progress->wait();
  if (progress->error) std::rethrow_exception(progress->error);
}

}  // namespace cinetile
