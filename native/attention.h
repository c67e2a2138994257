// Attention over tile plans for all heads of a call.
#pragma once

#include "kernel.h"
#include "parallel.h"
#include "problem.h"

namespace cinetile {

// Runs a problem in which find_fault found none. Needs memory for the packed keys and values of a
// few heads (two for each thread at most) and a small workspace for each task that is running.
// Throws std::bad_alloc where there is no memory, and Interrupted if the call was ended early.
void run_attention(const Problem& problem, const Kernel& kernel, Threads& threads);

}  // namespace cinetile
