// The C++ example's reader of safetensors and its model, under a fuzzer: a file is refused with an
// exception, or it is a model that runs.
#include "safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <vector>

#include "model.h"

namespace {

// A file without a folder, which the reader opens by this name.
struct MemoryFile {
  MemoryFile() : descriptor(memfd_create("model", 0)) {
    path = "/proc/self/fd/" + std::to_string(descriptor);
  }
  void assign(const uint8_t* data, std::size_t size) const {
    if (ftruncate(descriptor, 0) != 0 ||
        pwrite(descriptor, data, size, 0) != static_cast<ssize_t>(size)) {
      std::perror("memfd");
      std::abort();
    }
  }
  int descriptor;
  std::string path;
};

// What was read lies within the file: each tensor has as many numbers as its shape says.
void check(const SafeTensors& file, std::size_t size) {
  for (const auto& [name, weight] : file.weights) {
    std::size_t count = 1;
    for (const int64_t extent : weight.shape) count *= static_cast<std::size_t>(extent);
    if (count == weight.data.size() && weight.data.size() * sizeof(float) <= size) continue;
    std::fprintf(stderr, "broken: %s has another size than its shape\n", name.c_str());
    std::abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  static const MemoryFile file;
  if (size > 4096) return -1;
  file.assign(data, size);
  try {
    check(read_safetensors(file.path), size);
    Model model(file.path);
    model.forward({0});
    model.forward({0, 1});
  } catch (const std::exception&) {
    return 0;
  }
  return 0;
}
