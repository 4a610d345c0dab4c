// Options of the C++ API. Every field has the default that an empty `ForwardOptions{}` means.
#pragma once

#include <optional>

namespace anyflash {

// Instruction sets of the CPU kernels. kAuto takes the best that is built and that the CPU has.
enum class CpuIsa : int { kAuto, kBaseline, kAvx2, kAvx512, kNeon };

struct ForwardOptions {
  // Factor on q.k; any finite number. Not set: 1 / sqrt(head_dim).
  std::optional<double> softmax_scale;
  // Query i sees keys j <= i + seqlen_k - seqlen_q (aligned at the bottom right).
  bool causal = false;
  // CPU: number of threads; 0 is OpenMP's default (OMP_NUM_THREADS, else all cores).
  int num_threads = 0;
  CpuIsa cpu_isa = CpuIsa::kAuto;
  // CUDA: the cudaStream_t to launch on; null is the legacy default stream.
  void* stream = nullptr;
};

}  // namespace anyflash
