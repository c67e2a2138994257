// Threads of one's own, which sleep until there is work.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "parallel.h"

namespace cinetile {

// `count` threads together with the one that calls: count - 1 are started here, and end with the
// pool once they have done what was scheduled.
class ThreadPool : public Threads {
 public:
  explicit ThreadPool(int64_t count) : count_(count) {
    try {
      for (int64_t i = 1; i < count; ++i) threads_.emplace_back([this] { run(); });
    } catch (...) {
      close();  // the destructor will not run
      throw;
    }
  }
  ~ThreadPool() override { close(); }
  int64_t count() const override { return count_; }
  void schedule(std::function<void()> work) override {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      queue_.push_back(std::move(work));
    }
    news_.notify_one();
  }

 private:
  void run() {
    for (;;) {
      std::function<void()> work;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        news_.wait(lock, [this] { return closed_ || !queue_.empty(); });
        if (queue_.empty()) return;
        work = std::move(queue_.front());
        queue_.pop_front();
      }
      work();
    }
  }

  void close() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      closed_ = true;
    }
    news_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  const int64_t count_;
  std::mutex mutex_;
  std::condition_variable news_;
  std::deque<std::function<void()>> queue_;
  bool closed_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace cinetile
