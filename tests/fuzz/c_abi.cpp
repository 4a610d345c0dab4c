// The C ABI under a fuzzer: no crash, nothing written by a call that fails or beside an output, and
// every error names its argument. An input that breaks one of these ends the process.
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "call.h"

namespace {

using fuzz::Call;

[[noreturn]] void broken(const std::string& what) {
  std::fprintf(stderr, "broken: %s\n  last error: %s\n", what.c_str(), anyflash_last_error());
  std::abort();
}

void require(bool holds, const std::string& what) {
  if (!holds) broken(what);
}

std::vector<std::string> words_of(const std::string& text) {
  std::vector<std::string> words(1);
  for (const char c : text) {
    if (std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_') {
      words.back() += c;
    } else if (!words.back().empty()) {
      words.emplace_back();
    }
  }
  return words;
}

// Without the function's name.
std::string message() {
  const std::string text = anyflash_last_error();
  const std::size_t colon = text.find(": ");
  require(colon != std::string::npos && text.size() > colon + 2, "an error says nothing");
  return text.substr(colon + 2);
}

// The argument that was changed, if there was one alone; else any. Options of another size are
// those of another version, which lack arguments.
void check_names_argument(const Call& call, const std::string& text) {
  const std::string changed = call.only_change();
  const std::string only = changed == "options" ? "" : changed;
  for (const std::string& word : words_of(text)) {
    if (only.empty() ? call.has_argument(word) || word == "workspace" : word == only) return;
  }
  broken(only.empty() ? "an error names no argument" : "an error does not name " + only);
}

// Nothing is read or written there.
void check_refused(Call& call, anyflash_status status) {
  require(status != ANYFLASH_INTERNAL_ERROR, "an internal error");
  require(call.is_changed(), "a call is refused that is allowed");
  const std::string text = message();
  check_names_argument(call, text);
  require(call.run(nullptr, fuzz::kMostWorkspaceBytes) == status, "run() has another status");
  require(message() == text, "run() has another message");
  require(call.all_unchanged(), "a refused call has written");
}

void check_run(Call& call, std::size_t needed) {
  const std::size_t lacks = std::min(call.workspace_lacks(), needed);
  const std::size_t given = needed - lacks;
  const std::size_t skew = call.workspace_skew();
  const auto memory = std::make_unique<unsigned char[]>(skew + given);
  const anyflash_status status = call.run(memory.get() + skew, given);
  if (status == ANYFLASH_OK) {
    require(lacks == 0, "a workspace that is too small is accepted");
    const std::string wrong = call.wrongly_written();
    require(wrong.empty(), "beside the elements of an output, or in an input: " + wrong);
    return;
  }
  require(status != ANYFLASH_INTERNAL_ERROR, "an internal error");
  require(call.is_changed() || lacks > 0, "a call is refused that is allowed");
  if (lacks > 0) {
    require(message().find("workspace has ") == 0, "not about the workspace");
  } else {
    check_names_argument(call, message());
  }
  require(call.all_unchanged(), "a refused run has written");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  if (size > 256) return -1;  // more changes at once find nothing more
  static const int registered =
      std::atexit([] { std::printf("%ld calls of the C ABI\n", Call::calls); });
  static_cast<void>(registered);
  Call call(data, size);
  call.remember();
  constexpr std::size_t kUntouched = 0x5a5a5a5a5a5a5a5a;
  std::size_t bytes = kUntouched;
  const anyflash_status status = call.workspace_size(&bytes);
  require(call.all_unchanged(), "a tensor was written to find the workspace's size");
  if (status != ANYFLASH_OK) {
    require(bytes == kUntouched, "a size that was refused was written");
    check_refused(call, status);
  } else if (call.can_run() && bytes <= fuzz::kMostWorkspaceBytes) {
    check_run(call, bytes);
  }
  return 0;
}
