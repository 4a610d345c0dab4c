// The GIL, released while a call runs, and what happens to such calls when the interpreter ends.
//
// A thread that asks for the GIL then is unwound by CPython (before 3.14), through C++ that must
// not be: the process would abort. So the end waits for calls that run, and later ones keep the
// GIL.
#pragma once

#include <nanobind/nanobind.h>

#include <chrono>
#include <thread>

namespace anyflash::python {

// Both are read and written with the GIL held.
inline int running_calls = 0;
inline bool interpreter_ends = false;

class ReleasedGil {
 public:
  ReleasedGil() {
    if (interpreter_ends) return;
    ++running_calls;
    thread_ = PyEval_SaveThread();
  }
  ~ReleasedGil() {
    if (thread_ == nullptr) return;
    PyEval_RestoreThread(thread_);
    --running_calls;
  }
  ReleasedGil(const ReleasedGil&) = delete;
  ReleasedGil& operator=(const ReleasedGil&) = delete;

 private:
  PyThreadState* thread_ = nullptr;
};

inline void end_calls() {
  interpreter_ends = true;
  while (running_calls > 0) {
    const nanobind::gil_scoped_release release;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

inline void end_calls_at_exit() {
  nanobind::module_::import_("atexit").attr("register")(nanobind::cpp_function(&end_calls));
  const nanobind::module_ os = nanobind::module_::import_("os");
  if (!nanobind::hasattr(os, "register_at_fork")) return;  // Windows
  // A child of fork() has one thread, which is in no call.
  os.attr("register_at_fork")(nanobind::arg("after_in_child") =
                                  nanobind::cpp_function([] { running_calls = 0; }));
}

}  // namespace anyflash::python
