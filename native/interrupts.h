// Ending calls early when the process gets SIGINT.
#pragma once

#include <cstdint>
#include <stdexcept>

namespace cinetile {

// What a call throws that was ended early; its output is incomplete.
struct Interrupted : std::runtime_error {
  Interrupted() : std::runtime_error("interrupted by SIGINT") {}
};

// Calls of a process are numbered from 1 on. Those up to this number end early: kernels compare it
// with the number of their call between blocks of keys.
const int64_t* last_ended_call();

// Ends the calls up to this number that are still running.
void end_calls(int64_t last);

// From now on SIGINT is noticed while calls run. For each one, the number of the last call that had
// started, an int64_t, can be read from the file descriptor that is returned, or -1 where there is
// none. The reader decides whether these calls are to end. In a forked child it must be called
// anew.
int watch_interrupts();

// Stands for a call that is running. The first one puts a handler of SIGINT before the one that is
// there, which is called as before, and the last one takes it away again. Nothing is installed
// unless watch_interrupts was called, nor where SIGINT is ignored or ends the process.
class RunningCall {
 public:
  RunningCall();
  ~RunningCall();
  RunningCall(const RunningCall&) = delete;
  RunningCall& operator=(const RunningCall&) = delete;

  int64_t number() const { return number_; }
  void throw_if_interrupted() const;

 private:
  int64_t number_;
};

}  // namespace cinetile
