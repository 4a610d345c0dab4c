// The pool: every task is done once, by the caller and by whoever helps; callers beside each other,
// callers within tasks, and children of fork().
#include "threads.h"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "check.h"

namespace {

using anyflash::for_each_on_threads;
using anyflash::run_tasks;
using anyflash::threads_worth;

// Counts how often each task is done, and by which threads.
class Tasks {
 public:
  explicit Tasks(int64_t count) : done_(static_cast<std::size_t>(count)) {}

  void run(int threads, int microseconds = 0) {
    run_tasks(count(), threads, [&](int thread) {
      const std::lock_guard<std::mutex> lock(mutex_);
      CHECK(thread >= 0 && thread < threads);
      CHECK(numbers_.insert(thread).second);  // each has memory of its own
      ids_.insert(std::this_thread::get_id());
      return Runner{*this, microseconds};
    });
  }

  int64_t count() const { return static_cast<int64_t>(done_.size()); }
  std::size_t participants() const { return ids_.size(); }
  bool each_done_once() const {
    for (const std::atomic<int>& times : done_) {
      if (times != 1) return false;
    }
    return true;
  }

 private:
  struct Runner {
    Tasks& tasks;
    int microseconds;
    void run(int64_t task) {
      if (microseconds > 0) std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
      ++tasks.done_[static_cast<std::size_t>(task)];
    }
  };

  std::vector<std::atomic<int>> done_;
  std::mutex mutex_;
  std::set<int> numbers_;
  std::set<std::thread::id> ids_;
};

void check_tasks() {
  for (const int64_t count : {0, 1, 2, 7, 100, 5000, 100000}) {
    for (const int threads : {1, 2, 5, 64}) {
      Tasks tasks(count);
      tasks.run(threads);
      CHECK(tasks.each_done_once());
      CHECK(tasks.participants() <= static_cast<std::size_t>(threads));
    }
  }
  Tasks alone(9);
  alone.run(1);
  CHECK_EQ(alone.participants(), std::size_t{1});
}

void check_elements() {
  for (const int64_t count : {0, 1, 3, 31, 1000}) {
    std::vector<std::atomic<int>> done(static_cast<std::size_t>(count));
    for_each_on_threads(count, 3, [&](int64_t i) { ++done[static_cast<std::size_t>(i)]; });
    for (const std::atomic<int>& times : done) CHECK_EQ(times.load(), 1);
  }
}

// Whether all threads take part where tasks leave the cores idle: at last, on a busy machine.
bool all_help() {
  for (int round = 0; round < 100; ++round) {
    Tasks tasks(64);
    tasks.run(4, 500);
    CHECK(tasks.each_done_once());
    if (tasks.participants() == 4) return true;
  }
  return false;
}

void check_callers() {
  std::vector<std::thread> callers;
  for (int i = 0; i < 8; ++i) {
    callers.emplace_back([] {
      for (int repeat = 0; repeat < 50; ++repeat) {
        Tasks tasks(200);
        tasks.run(3);
        CHECK(tasks.each_done_once());
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  std::atomic<int> inner{0};
  for_each_on_threads(8, 4, [&](int64_t) {
    Tasks tasks(50);
    tasks.run(4);
    CHECK(tasks.each_done_once());
    ++inner;
  });
  CHECK_EQ(inner.load(), 8);
}

// Whether calls in a child end, and have help: its parent's workers are not there.
int in_child() {
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    std::_Exit(all_help() ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  return status;
}

void check_fork() {
#if defined(__SANITIZE_THREAD__)
  return;  // Thread Sanitizer allows a child no threads
#endif
  CHECK_EQ(in_child(), 0);
  // While another thread is in a call.
  std::atomic<bool> stop{false};
  std::thread busy([&] {
    while (!stop) {
      Tasks tasks(100);
      tasks.run(4);
    }
  });
  for (int i = 0; i < 20; ++i) CHECK_EQ(in_child(), 0);
  stop = true;
  busy.join();
  check_tasks();
}

void check_worth() {
  CHECK_EQ(threads_worth(8, 0), 1);
  CHECK_EQ(threads_worth(0, 1e12), 1);
  CHECK_EQ(threads_worth(8, 1e12), 8);
  // A call of two sequences of 17 tokens, 4 heads of head dim 64, is one thread's work.
  CHECK_EQ(threads_worth(2, 4.0 * 2 * 4 * 17 * 17 * 64), 1);
  int last = 1;
  for (double work = 1e6; work < 1e9; work *= 1.1) {
    const int threads = threads_worth(64, work);
    CHECK(threads >= last);
    last = threads;
  }
  CHECK_EQ(last, 64);
}

}  // namespace

int main() {
  check_tasks();
  check_elements();
  CHECK(all_help());
  check_callers();
  check_fork();
  check_worth();
  return check::report();
}
