// Running tasks on threads that someone else owns.
#pragma once

#include <cstdint>
#include <functional>

namespace cinetile {

// Threads that take work without promising when; the caller always works along.
class Threads {
 public:
  virtual ~Threads() = default;
  virtual int64_t count() const = 0;
  virtual void schedule(std::function<void()> work) = 0;
};

// Calls task(0), ..., task(num_tasks - 1), each once, on at most threads.count() threads at a
// time, and returns when all are done. A task that throws ends the others early, and the first
// exception comes out here. It cannot deadlock on a pool whose threads are all waiting: tasks that
// no other thread has begun are done by the caller.
void parallel_for(Threads& threads, int64_t num_tasks, const std::function<void(int64_t)>& task);

}  // namespace cinetile
