// The CPU's threads: a pool whose workers sleep until there is work and help where they find some.
//
// A caller does its work itself and waits for nobody but those who are in the midst of a task. On
// busy cores a worker may wait for milliseconds before it runs; a call then takes no longer than
// with one thread. OpenMP's barriers wait for all threads of a team, and spin meanwhile. A child of
// fork() has no workers and makes its own.
#pragma once

#include <cstdint>

namespace anyflash {

// What num_threads = 0 means: OpenMP's default, and in an OpenMP region, which others share, 1.
int default_threads();

// How many of the threads `work` is worth, at least 1. Work is counted in floating-point operations
// of matrix products; what else takes time is counted as what takes as long.
int threads_worth(int threads, double work);

// Calls body(argument, thread) for thread 0, on the caller's thread, and for some others of
// [1, threads) on workers. It does so at most once for each, and perhaps late: body shares the work
// out by itself, and returns where none is left. Returns when no call runs any more, and none will.
void run_on_threads(int threads, void (*body)(const void* argument, int thread),
                    const void* argument);

// Calls make_runner(thread).run(task) for every task.
template <class MakeRunner>
void run_tasks(std::int64_t tasks, int threads, const MakeRunner& make_runner) {
  if (tasks <= 0) return;
  if (threads > tasks) threads = static_cast<int>(tasks);
  // Tiny tasks (thousands of short sequences) are handed out several at a time.
  const std::int64_t many = tasks / (std::int64_t{256} * threads);
  const std::int64_t chunk = threads == 1 ? tasks : many < 1 ? 1 : many < 64 ? many : 64;
  std::int64_t next = 0;
  const auto body = [&](int thread) {
    // Builtins, not std::atomic: see ANYFLASH_SHARED_NAMESPACE for what inline functions may do.
    std::int64_t begin = __atomic_fetch_add(&next, chunk, __ATOMIC_RELAXED);
    if (begin >= tasks) return;
    auto runner = make_runner(thread);
    for (; begin < tasks; begin = __atomic_fetch_add(&next, chunk, __ATOMIC_RELAXED)) {
      const std::int64_t end = tasks - begin < chunk ? tasks : begin + chunk;
      for (std::int64_t i = begin; i < end; ++i) runner.run(i);
    }
  };
  run_on_threads(
      threads,
      [](const void* argument, int thread) {
        (*static_cast<const decltype(body)*>(argument))(thread);
      },
      &body);
}

// Calls function(i) for every i of [0, count), each of which takes as long as the others.
template <class Function>
void for_each_on_threads(std::int64_t count, int threads, const Function& function) {
  const std::int64_t most = std::int64_t{16} * threads;
  const std::int64_t blocks = count < most ? count : most;
  const auto run_block = [&](std::int64_t block) {
    const std::int64_t end = count * (block + 1) / blocks;
    for (std::int64_t i = count * block / blocks; i < end; ++i) function(i);
  };
  struct Runner {
    const decltype(run_block)& run;
  };
  run_tasks(blocks, threads, [&](int /*thread*/) { return Runner{run_block}; });
}

}  // namespace anyflash
