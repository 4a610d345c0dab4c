// A fuzzer for compilers without libFuzzer (g++ has the coverage, and nothing that uses it):
//
//   fuzz_c_abi -runs=N -seed=S FOLDER...
//
// Runs the files of the folders, then N changed ones; those that reach code that none has reached
// are changed further. A seed and a number of runs always do the same. The input at hand when the
// process dies is written to ./crash-input; to run it again, give its folder.
#include <sanitizer/common_interface_defs.h>

#include <algorithm>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size);

namespace {

using Input = std::vector<uint8_t>;

constexpr std::size_t kPlaces = 1 << 16;
constexpr std::size_t kLongest = 4096;

// How often a place was reached; places are addresses, which may share a number.
unsigned char reached[kPlaces];
// Which counts, in classes of powers of two, were seen at all.
unsigned char seen[kPlaces];
const Input* at_hand = nullptr;

void write_at_hand() {
  if (at_hand == nullptr) return;
  std::ofstream("crash-input", std::ios::binary)
      .write(reinterpret_cast<const char*>(at_hand->data()),
             static_cast<std::streamsize>(at_hand->size()));
  std::fprintf(stderr, "the input is in crash-input\n");
}

bool is_new() {
  bool found = false;
  for (std::size_t i = 0; i < kPlaces; ++i) {
    if (reached[i] == 0) continue;
    const auto bit = static_cast<unsigned char>(1 << (31 - __builtin_clz(reached[i])));
    found |= (seen[i] & bit) == 0;
    seen[i] |= bit;
    reached[i] = 0;
  }
  return found;
}

bool run(const Input& input) {
  const Input exact(input.begin(), input.end());  // nothing behind its end
  at_hand = &exact;
  LLVMFuzzerTestOneInput(exact.data(), exact.size());
  at_hand = nullptr;
  return is_new();
}

class Mutator {
 public:
  explicit Mutator(unsigned seed) : random_(seed) {}

  std::size_t below(std::size_t count) { return random_() % count; }

  Input changed(Input input, const std::vector<Input>& others) {
    for (std::size_t changes = 1 + below(4); changes > 0; --changes) {
      if (input.empty()) input.push_back(0);
      const std::size_t at = below(input.size());
      const std::size_t room = input.size() - at;
      switch (below(6)) {
        case 0:
          input[at] ^= static_cast<uint8_t>(1 << below(8));
          break;
        case 1:
          input[at] = static_cast<uint8_t>(random_());
          break;
        case 2:
          input[at] = static_cast<uint8_t>(input[at] + below(3) - 1);
          break;
        case 3:
          input.erase(input.begin() + static_cast<std::ptrdiff_t>(at),
                      input.begin() + static_cast<std::ptrdiff_t>(
                                          at + 1 + below(std::min<std::size_t>(room, 8))));
          break;
        case 4:
          for (std::size_t count = 1 + below(8); count > 0; --count) {
            input.insert(input.begin() + static_cast<std::ptrdiff_t>(at),
                         static_cast<uint8_t>(random_()));
          }
          break;
        default: {
          const Input& other = others[below(others.size())];
          const std::size_t count = std::min(room, other.size() > at ? other.size() - at : 0);
          std::copy_n(other.begin() + static_cast<std::ptrdiff_t>(count == 0 ? 0 : at), count,
                      input.begin() + static_cast<std::ptrdiff_t>(at));
        }
      }
    }
    if (input.size() > kLongest) input.resize(kLongest);
    return input;
  }

 private:
  std::mt19937 random_;
};

std::vector<Input> files_of(const std::vector<std::string>& folders) {
  std::vector<std::filesystem::path> paths;
  for (const std::string& folder : folders) {
    for (const auto& file : std::filesystem::directory_iterator(folder)) {
      paths.push_back(file.path());
    }
  }
  std::sort(paths.begin(), paths.end());
  std::vector<Input> inputs;
  for (const auto& path : paths) {
    std::ifstream file(path, std::ios::binary);
    inputs.emplace_back((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  }
  return inputs;
}

}  // namespace

// Called by the code that is tested at each of its places.
extern "C" void __sanitizer_cov_trace_pc() {
  const auto place = reinterpret_cast<std::uintptr_t>(__builtin_return_address(0)) % kPlaces;
  if (reached[place] < 255) ++reached[place];
}

int main(int argc, char** argv) {
  long runs = 0;
  unsigned seed = 1;
  std::vector<std::string> folders;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument.rfind("-runs=", 0) == 0) {
      runs = std::stol(argument.substr(6));
    } else if (argument.rfind("-seed=", 0) == 0) {
      seed = static_cast<unsigned>(std::stoul(argument.substr(6)));
    } else {
      folders.push_back(argument);
    }
  }
  __sanitizer_set_death_callback(write_at_hand);
  std::signal(SIGABRT, [](int) { write_at_hand(); });  // of the fuzzer itself; then it dies
  std::vector<Input> inputs = files_of(folders);
  const std::size_t given = inputs.size();
  for (const Input& input : inputs) run(input);
  if (inputs.empty()) inputs.emplace_back(64);
  Mutator mutator(seed);
  for (long i = 0; i < runs; ++i) {
    Input input = mutator.changed(inputs[mutator.below(inputs.size())], inputs);
    if (run(input)) inputs.push_back(std::move(input));
  }
  std::printf("%zu files and %ld changed inputs: no finding; %zu of those reached something new\n",
              given, runs, inputs.size() - given);
  return 0;
}
