// A failed CHECK prints where and what, counts, and goes on; main() ends with `return report();`.
#pragma once

#include <atomic>
#include <iostream>
#include <sstream>
#include <string>

namespace check {

inline std::atomic<int> passed{0};
inline std::atomic<int> failed{0};

inline bool note(bool ok, const char* file, int line, const std::string& what) {
  if (ok) {
    ++passed;
    return true;
  }
  constexpr int kPrinted = 20;
  if (++failed <= kPrinted) std::cerr << file << ":" << line << ": failed: " << what << "\n";
  return false;
}

template <class A, class B>
bool note_equal(const A& a, const B& b, const char* file, int line, const char* what) {
  if (a == b) return note(true, file, line, "");
  std::ostringstream text;
  text << what << " (" << a << " and " << b << ")";
  return note(false, file, line, text.str());
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// A test without a single check has tested nothing.
inline int report() {
  std::cerr << passed << " checks passed, " << failed << " failed\n";
  return failed == 0 && passed > 0 ? 0 : 1;
}

}  // namespace check

#define CHECK(condition) check::note((condition), __FILE__, __LINE__, #condition)
// `text` is put after the condition: what was tested.
#define CHECK_MSG(condition, text) \
  check::note((condition), __FILE__, __LINE__, std::string(#condition) + ": " + (text))
#define CHECK_EQ(a, b) check::note_equal((a), (b), __FILE__, __LINE__, #a " == " #b)
