// dispatch.cpp, select_gpu.cpp, select_cpu.cpp: which row of a table runs a problem, and what is
// said where none does. The table and the GPU are this test's.
#include <cstring>
#include <string>
#include <vector>

#include "anyflash/error.h"
#include "check.h"
#include "cpu_features.h"
#include "device.h"
#include "dispatch_kernels.h"
#include "kernel_table.h"
#include "tuned_tiles.h"

namespace anyflash {

namespace {

// The order is of no consequence: larger ones and those with features come first here.
constexpr KernelDescriptor kRows[] = {
    sm80_kernel("backward_d128_generic", 128, 128, kAllFeatures, 98000, Op::kBackward),
    sm80_kernel("backward_d64", 64, 64, kNoFeatures, 60000, Op::kBackward),
    sm80_kernel("backward_d64_softcap", 64, 64, kSoftcap, 60000, Op::kBackward),
    config_kernel("backward_d256", 1, 150000),
    config_kernel("backward_d256_compact", 2, 98000),
    config_kernel("backward_d256_wide", 2, 110000),
    cpu_kernel("cpu_backward", Op::kBackward),
    sm80_kernel("d256_generic", 256, 256, kAllFeatures, 160000),
    sm80_kernel("d224_softcap", 224, 224, kSoftcap, 120000),
    sm80_kernel("d192_compact", 192, 192, kNoFeatures, 90000),
    sm80_kernel("d192", 192, 192, kNoFeatures, 120000),
    sm80_kernel("d256", 256, 256, kNoFeatures, 150000),
    sm80_kernel("d128_generic", 128, 128, kAllFeatures, 90000),
    sm80_kernel("d128_softcap", 128, 128, kSoftcap, 80000),
    sm80_kernel("d128", 128, 128, kNoFeatures, 80000),
    sm80_kernel("d192_v128", 192, 128, kNoFeatures, 95000),
    sm80_kernel("d64", 64, 64, kNoFeatures, 40000),
    tile_kernel("d80_compact", 80, 64, 30000),
    tile_kernel("d80", 80, 128, 60000),
    tile_kernel("d80_wide", 80, 128, 200000),
    tile_kernel("d72_wide", 72, 64, 85000, 2),
    tile_kernel("d72", 72, 128, 80000),
    sm90_kernel("sm90_d128", 128, 150000),
    sm90_kernel("sm90_d112", 112, 220000),
    other_bits_kernel("d48_compact", 48, 64, 30000),
    tile_kernel("d48", 48, 128, 60000),
    cpu_kernel("cpu", Op::kForward),
    cpu_kernel("cpu_f64", Op::kForward, CpuIsa::kBaseline, DType::kFloat64),
    cpu_kernel("cpu_avx2_f64", Op::kForward, CpuIsa::kAvx2, DType::kFloat64),
    cpu_kernel("cpu_avx512_backward", Op::kBackward, CpuIsa::kAvx512),
    cpu_kernel("cpu_decode", Op::kDecode),
    cpu_kernel("cpu_avx512_decode", Op::kDecode, CpuIsa::kAvx512),
    bfloat16_kernel("forward_bf16"),
    decode_kernel("decode_d128_m64_8bit", 128, 64, kScores | kQuantizedCache, 90000),
    decode_kernel("decode_d128_m64", 128, 64, kScores, 90000),
    decode_kernel("decode_d64_m64", 64, 64, kScores, 50000),
    decode_kernel("decode_d128_m16_8bit", 128, 16, kScores | kQuantizedCache, 60000),
    decode_kernel("decode_d128_m16", 128, 16, kScores, 60000),
    decode_kernel("decode_d128_m32", 128, 32, kScores, 70000),
    decode_kernel("decode_d64_m16", 64, 16, kScores, 30000),
    decode_kernel("decode_d256_m16", 256, 16, kScores, 90000),
    latent_kernel("decode_d320_256_m16", 16, 90000),
    latent_kernel("decode_d320_256_m64", 64, 90000),
};
constexpr KernelUnit kUnit{kRows, sizeof(kRows) / sizeof(kRows[0])};

DeviceProperties gpu;

}  // namespace

const KernelUnit* const kKernelUnits[] = {&kUnit};
const std::size_t kKernelUnitCount = 1;
const char* const kCudaArchs[] = {"sm_80", "sm_90", "sm_90a", "sm_101", nullptr};
const char* const kSpecificArchs[] = {"90a", "103a", nullptr};

int questions = 0;  // about the GPU
const DeviceProperties& device_properties(int) { return ++questions, gpu; }

const TunedTile kTunedTiles[] = {{}};

}  // namespace anyflash

using namespace anyflash;

namespace {

// Of float16, without features.
Problem problem_on(DeviceType device, Op op, int head_dim, int head_dim_v) {
  Problem problem;
  problem.op = op;
  problem.device = {device, 0};
  problem.dtype = DType::kFloat16;
  problem.head_dim = head_dim;
  problem.head_dim_v = head_dim_v;
  problem.features = kNoFeatures;
  problem.cpu_isa = CpuIsa::kAuto;
  return problem;
}

DeviceProperties gpu_with(int compute_capability, int multiprocessors, std::size_t smem_per_block,
                          std::size_t smem_per_multiprocessor) {
  DeviceProperties properties;
  properties.name = "test GPU";
  properties.compute_capability = compute_capability;
  properties.multiprocessors = properties.full_grid = multiprocessors;
  properties.smem_per_block = smem_per_block;
  properties.smem_per_multiprocessor = smem_per_multiprocessor;
  return properties;
}

std::string selected(int head_dim, int head_dim_v, unsigned features, DType dtype = DType::kFloat16,
                     Op op = Op::kForward) {
  Problem problem = problem_on(DeviceType::kCuda, op, head_dim, head_dim_v);
  problem.dtype = dtype;
  problem.features = features;
  return select_kernel(problem).name;
}

std::string selected_decode(int head_dim, int64_t rows, unsigned features) {
  Problem problem = problem_on(DeviceType::kCuda, Op::kDecode, head_dim, head_dim);
  problem.features = features;
  problem.rows = rows;
  return select_kernel(problem).name;
}

std::string selected_latent(int head_dim, int head_dim_v, int64_t rows) {
  Problem problem = problem_on(DeviceType::kCuda, Op::kDecode, head_dim, head_dim_v);
  problem.rows = rows;
  problem.latent = true;
  return select_kernel(problem).name;
}

std::string selected_on_cpu(Op op, CpuIsa isa = CpuIsa::kBaseline, DType dtype = DType::kFloat32) {
  Problem problem = problem_on(DeviceType::kCpu, op, 1000, 7);
  problem.dtype = dtype;
  problem.features = kAllFeatures;
  problem.cpu_isa = isa;
  return select_kernel(problem).name;
}

template <class Function>
void check_throws(const Function& selected, ErrorCode code, const std::string& words) {
  try {
    CHECK_MSG(false, selected());
  } catch (const Error& error) {
    CHECK(error.code() == code);
    CHECK_MSG(check::contains(error.what(), words), error.what());
  }
}

void check_error(int head_dim, unsigned features, DType dtype, ErrorCode code,
                 const std::string& words, Op op = Op::kForward) {
  check_throws([&] { return selected(head_dim, head_dim, features, dtype, op); }, code, words);
}

void check_error_of_v(Op op, const std::string& words) {
  check_throws([&] { return selected(64, 300, kNoFeatures, DType::kFloat16, op); },
               ErrorCode::kUnsupported, words);
}

void check_choice() {
  gpu = {"test GPU", 80, 108, 163840};
  CHECK_EQ(selected(64, 64, 0), "d64");
  CHECK_EQ(selected(1, 1, 0), "d48");
  CHECK_EQ(selected(81, 64, 0), "d128");
  CHECK_EQ(selected(64, 81, 0), "d128");
  CHECK_EQ(selected(192, 128, 0), "d192_v128");
  CHECK_EQ(selected(128, 192, 0), "d192");
  CHECK_EQ(selected(200, 192, 0), "d256");
  // The fewest features that do, of the smallest head dims that do.
  CHECK_EQ(selected(64, 64, kSoftcap), "d128_softcap");
  CHECK_EQ(selected(64, 64, kSoftcap | kBias), "d128_generic");
  CHECK_EQ(selected(192, 128, kDropout), "d256_generic");
  CHECK_EQ(selected_on_cpu(Op::kForward), "cpu");
  // Each operation has rows of its own.
  CHECK_EQ(selected_on_cpu(Op::kBackward), "cpu_backward");
  CHECK_EQ(selected(64, 64, 0, DType::kFloat16, Op::kBackward), "backward_d64");
  CHECK_EQ(selected(64, 64, kAlibi, DType::kFloat16, Op::kBackward), "backward_d128_generic");
  CHECK_EQ(selected(64, 64, kSoftcap, DType::kFloat16, Op::kBackward), "backward_d64_softcap");
  CHECK_EQ(selected(64, 64, kSoftcap | kLargeSoftcap, DType::kFloat16, Op::kBackward),
           "backward_d128_generic");
}

// The best instruction set that has a kernel, not the best that has some.
void check_cpu_choice() {
  CpuIsa best = CpuIsa::kBaseline;
  for (const CpuIsa isa : {CpuIsa::kAvx2, CpuIsa::kAvx512}) {
    if (cpu_has(isa)) best = isa;
  }
  CHECK(anyflash::best_isa() == best);
  CHECK_EQ(selected_on_cpu(Op::kForward, CpuIsa::kAuto, DType::kFloat32), "cpu");
  CHECK_EQ(selected_on_cpu(Op::kForward, CpuIsa::kAuto, DType::kFloat64),
           cpu_has(CpuIsa::kAvx2) ? "cpu_avx2_f64" : "cpu_f64");
  CHECK_EQ(selected_on_cpu(Op::kForward, CpuIsa::kBaseline, DType::kFloat64), "cpu_f64");
  if (cpu_has(CpuIsa::kAvx2)) {  // the table has no kernel for it
    check_throws(
        [] { return selected_on_cpu(Op::kBackward, CpuIsa::kAvx2, DType::kFloat32); },
        ErrorCode::kUnsupported,
        "cpu_isa is avx2, for which this build has no CPU backward kernels for float32; it "
        "has those of baseline and avx512");
    check_throws([] { return selected_on_cpu(Op::kDecode, CpuIsa::kAvx2, DType::kFloat64); },
                 ErrorCode::kUnsupported, "kernels for float64; it has those of none");
  }
  if (!cpu_has(CpuIsa::kAmx)) return;
  CHECK_EQ(selected_on_cpu(Op::kBackward, CpuIsa::kAmx, DType::kFloat32), "cpu_avx512_backward");
}

// Smaller tiles where a grid of larger ones would be smaller than the GPU, if as many CTAs as they
// are made for fit a multiprocessor.
void check_small_grids() {
  const auto with = [](int64_t rows, int64_t pairs, int head_dim = 80) {
    Problem problem = problem_on(DeviceType::kCuda, Op::kForward, head_dim, head_dim);
    problem.rows = rows;
    problem.pairs = pairs;
    return std::string(select_kernel(problem).name);
  };
  gpu = gpu_with(80, 108, 163840, 167936);
  CHECK_EQ(with(1, 107), "d80_compact");
  CHECK_EQ(with(1, 108), "d80");
  CHECK_EQ(with(128, 107), "d80_compact");
  CHECK_EQ(with(129, 54), "d80");
  CHECK_EQ(with(129, 53), "d80_compact");
  gpu.smem_per_block = 227 * 1024;
  CHECK_EQ(with(128, 107), "d80_compact");
  CHECK_EQ(with(128, 108), "d80_wide");
  CHECK_EQ(with(1, 107, 72), "d72");
  gpu.smem_per_multiprocessor = 228 * 1024;
  CHECK_EQ(with(1, 107, 72), "d72_wide");
  CHECK_EQ(with(128, 108, 72), "d72_wide");
}

// Rows for GPUs with less or more shared memory: first those as many of whose CTAs a multiprocessor
// holds as they are made for, then the largest.
void check_tile_configs() {
  const auto with = [](std::size_t kilobytes) {
    const std::size_t bytes = kilobytes * 1024;
    gpu = gpu_with(80, 108, bytes - 1024, bytes);
    return selected(256, 256, 0, DType::kFloat16, Op::kBackward);
  };
  CHECK_EQ(with(228), "backward_d256_wide");
  CHECK_EQ(with(200), "backward_d256_compact");
  CHECK_EQ(with(164), "backward_d256");
  CHECK_EQ(with(120), "backward_d256_wide");
  CHECK_EQ(with(100), "backward_d256_compact");
}

// What needs all of a block's shared memory runs.
void check_exact_memory() {
  gpu = gpu_with(80, 108, 150000, 167936);
  CHECK_EQ(selected(256, 256, 0), "d256");
  gpu.smem_per_block = 149999;
  check_error(256, 0, DType::kFloat16, ErrorCode::kUnsupported, "");
}

// A family of one architecture: only there, and before all others, whatever else they have.
void check_families() {
  gpu = gpu_with(90, 132, 227 * 1024, 228 * 1024);
  CHECK_EQ(selected(128, 128, 0), "sm90_d128");
  CHECK_EQ(selected(64, 64, 0), "sm90_d112");
  CHECK_EQ(selected(192, 192, 0), "d192");               // none for these head dims,
  CHECK_EQ(selected(64, 64, kSoftcap), "d128_softcap");  // or with these features
  Problem negative = problem_on(DeviceType::kCuda, Op::kForward, 128, 128);
  negative.positive_scale = false;
  CHECK_EQ(std::string(select_kernel(negative).name), "d128");
  gpu.smem_per_block = 163840;
  CHECK_EQ(selected(64, 64, 0), "sm90_d128");
  for (const int other : {80, 89, 99}) {
    gpu.compute_capability = other;
    CHECK_EQ(selected(128, 128, 0), "d128");
  }
  CHECK(built_for(80) && built_for(86) && built_for(90) && !built_for(100) && !built_for(75));
  CHECK(!built_for(87) && built_for(101) && !built_for(103));  // Jetson and DRIVE, or not
  CHECK(built_for(kSm80Family, 90) && !built_for(kSm80Family, 100));
  CHECK(built_for(kSm90Family, 90));
  CHECK(!built_for(kSm90Family, 80) && !built_for(kSm90Family, 91));
}

// A size must not choose between kernels that give a row other bits.
void check_bits_groups() {
  gpu = gpu_with(80, 108, 163840, 167936);
  for (const int64_t rows : {1, 1000}) {
    Problem problem = problem_on(DeviceType::kCuda, Op::kForward, 48, 48);
    problem.rows = rows;
    problem.pairs = 1;
    CHECK_EQ(select_kernel(problem).name, std::string("d48"));
  }
}

// The smallest tile that holds all rows, else the largest; then the head dims; then the features.
void check_decode_choice() {
  gpu = {"test GPU", 80, 108, 163840};
  CHECK_EQ(selected_decode(128, 0, 0), "decode_d128_m16");
  CHECK_EQ(selected_decode(128, 1, 0), "decode_d128_m16");
  CHECK_EQ(selected_decode(128, 16, kSoftcap), "decode_d128_m16");
  CHECK_EQ(selected_decode(128, 17, 0), "decode_d128_m32");
  CHECK_EQ(selected_decode(128, 33, 0), "decode_d128_m64");
  CHECK_EQ(selected_decode(128, 65, 0), "decode_d128_m64");
  CHECK_EQ(selected_decode(128, int64_t{1} << 40, 0), "decode_d128_m64");
  CHECK_EQ(selected_decode(64, 8, kAlibi), "decode_d64_m16");
  CHECK_EQ(selected_decode(64, 20, 0), "decode_d128_m32");
  CHECK_EQ(selected_decode(33, 64, 0), "decode_d64_m64");
  CHECK_EQ(selected_decode(129, 64, 0), "decode_d256_m16");
  CHECK_EQ(selected_decode(64, 3, kQuantizedCache), "decode_d128_m16_8bit");
  CHECK_EQ(selected_decode(64, 17, kQuantizedCache | kAlibi), "decode_d128_m64_8bit");
  CHECK_EQ(selected_on_cpu(Op::kDecode), "cpu_decode");
  // Kernels whose values are columns of the keys, and others where these load fewer columns.
  CHECK_EQ(selected_latent(320, 256, 1), "decode_d320_256_m16");
  CHECK_EQ(selected_latent(257, 20, 17), "decode_d320_256_m64");
  CHECK_EQ(selected_latent(256, 256, 16), "decode_d320_256_m16");
  CHECK_EQ(selected_latent(128, 64, 16), "decode_d128_m16");
  check_error(320, kNoFeatures, DType::kFloat16, ErrorCode::kUnsupported,
              "q has head dim 320; the decode kernels of this build for float16", Op::kDecode);
  gpu.smem_per_block = 65536;
  CHECK_EQ(selected_decode(128, 64, 0), "decode_d128_m16");
  check_error(
      200, kNoFeatures, DType::kFloat16, ErrorCode::kUnsupported,
      "q has head dim 200; the decode kernels of this build for float16 that fit test GPU's "
      "65536 bytes of shared memory take head dims up to 128",
      Op::kDecode);
  check_error(256, kQuantizedCache, DType::kFloat16, ErrorCode::kUnsupported,
              "the decode kernels of this build for float16 with quantized_cache that fit",
              Op::kDecode);
}

void check_errors() {
  gpu.smem_per_block = 163840;
  check_error_of_v(Op::kForward, "v has head dim 300; the forward kernels");
  check_error_of_v(Op::kBackward, "v has head dim 300; the backward kernels");
  check_error_of_v(Op::kDecode, "v_cache has head dim 300; the decode kernels");
  check_error(
      300, 0, DType::kFloat16, ErrorCode::kUnsupported,
      "q has head dim 300; the forward kernels of this build for float16 that fit test GPU's "
      "163840 bytes of shared memory take head dims up to 256");
  check_error(64, 0, DType::kFloat32, ErrorCode::kInvalidType,
              "q is float32; the CUDA forward kernels of this build take float16 and bfloat16");
  gpu.smem_per_block = 101376;
  check_error(
      256, 0, DType::kFloat16, ErrorCode::kUnsupported,
      "q has head dim 256; the forward kernels of this build for float16 that fit test GPU's "
      "101376 bytes of shared memory take head dims up to 192");
  CHECK_EQ(selected(192, 192, 0), "d192_compact");
  CHECK_EQ(selected(192, 192, 0, DType::kFloat16, Op::kBackward), "backward_d256_compact");
  check_error(
      192, kBias, DType::kFloat16, ErrorCode::kUnsupported,
      "q has head dim 192; the backward kernels of this build for float16 with bias that fit "
      "test GPU's 101376 bytes of shared memory take head dims up to 128",
      Op::kBackward);
  // Of types that kernels have in another build, another error.
  check_error(64, 0, DType::kFloat32, ErrorCode::kInvalidType,
              "q is float32; the CUDA backward kernels of this build take float16", Op::kBackward);
  check_error(64, 0, DType::kBFloat16, ErrorCode::kUnsupported,
              "q is bfloat16; the CUDA backward kernels of this build take float16", Op::kBackward);
  CHECK_EQ(selected(128, 128, kBias), "d128_generic");
  gpu.smem_per_block = 85000;
  check_error(64, kBias | kDropout, DType::kFloat16, ErrorCode::kUnsupported,
              "q has head dim 64; this build has no forward kernels for float16 with bias, dropout "
              "that fit test GPU's 85000 bytes of shared memory");
  CHECK_EQ(selected(64, 64, kSoftcap), "d128_softcap");
  gpu.compute_capability = 75;
  check_error(64, 0, DType::kFloat16, ErrorCode::kUnsupported,
              "CUDA device 0 (test GPU) has compute capability 7.5; this build holds code for "
              "sm_80, sm_90, sm_90a, sm_101; GPUs of compute capability 8.0 or later can be used");
  gpu.compute_capability = 103;
  check_error(64, 0, DType::kFloat16, ErrorCode::kUnsupported,
              "this build holds code for sm_80, sm_90, sm_90a, sm_101; build it with "
              "ANYFLASH_ARCHS='103;103a', or install a newer release");
  gpu.compute_capability = 110;
  check_error(64, 0, DType::kFloat16, ErrorCode::kUnsupported,
              "build it with ANYFLASH_ARCHS=110, or install a newer release");
}

// A call with packed queries and a cache makes some choices, and the next one the same, without a
// question but which GPU it is.
void check_memory() {
  gpu = {"test GPU", 80, 108, 163840};
  for (const bool known : {false, true}) {
    questions = 0;
    for (const int64_t rows : {4, 20, 40}) selected_decode(128, rows, 0);
    CHECK_EQ(questions == 3, known);
  }
}

}  // namespace

int main() {
  check_choice();
  check_cpu_choice();
  check_small_grids();
  check_exact_memory();
  check_families();
  check_bits_groups();
  check_tile_configs();
  check_decode_choice();
  check_memory();
  check_errors();
  return check::report();
}
