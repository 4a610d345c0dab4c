// What a Hopper GPU's units reach, each alone: wgmma, L2 reads by TMA, bulk reductions, ex2, and
// the host's tensor maps. Prints one line a measurement. The bounds of cpp/kernels/sm90.
//
//   nvcc -std=c++17 -O3 -gencode arch=compute_90a,code=sm_90a -I cpp/include -I cpp/src \
//     -I cpp/kernels -I CUTLASS/include tests/gpu/hopper/limits.cu -o limits
#include <cuda_bf16.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "sm90/pipeline.h"
#include "sm90/tma.h"
#include "sm90/wgmma.h"

namespace {

using namespace anyflash;
using namespace anyflash::sm90;
using Element = cutlass::bfloat16_t;

void check(cudaError_t status) {
  if (status == cudaSuccess) return;
  std::printf("%s\n", cudaGetErrorString(status));
  std::exit(1);
}

// Median milliseconds of a launch, of five after one.
template <class Launch>
double milliseconds(const Launch& launch) {
  cudaEvent_t start, stop;
  check(cudaEventCreate(&start));
  check(cudaEventCreate(&stop));
  std::vector<float> times;
  for (int i = 0; i < 6; ++i) {
    check(cudaEventRecord(start));
    launch();
    check(cudaEventRecord(stop));
    check(cudaEventSynchronize(stop));
    check(cudaGetLastError());
    float time = 0.0f;
    check(cudaEventElapsedTime(&time, start, stop));
    if (i > 0) times.push_back(time);
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

template <class Kernel>
void allow_smem(Kernel* kernel, int bytes) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
}

__device__ uint32_t hash(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

// About normal, of unit variance.
__device__ __nv_bfloat16 random_number(uint32_t seed) {
  float sum = -4.0f;
  for (int i = 0; i < 8; ++i) sum += hash(8 * seed + i) * 0x1p-32f;
  return __float2bfloat16(sum * 1.2247f);
}

__global__ void fill(__nv_bfloat16* data, int64_t count) {
  for (int64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
    data[i] = random_number(static_cast<uint32_t>(i));
  }
}

// --- wgmma: groups of eight k16 steps, as an attention tile has them, two groups in flight.

enum class Source { kSmem, kRegisters, kAttention };

// kAttention: S = A B^T (64 x kN) from shared memory, then O += P V (64 x kN) from registers.
constexpr int kPanels = 6;  // two of A, up to four of B

template <int kN, Source kSource, int kWarpgroups>
__global__ void __launch_bounds__(128 * kWarpgroups, 1) wgmma_kernel(int repeats, float* sink) {
  auto* const smem = reinterpret_cast<__nv_bfloat16*>(anyflash_smem);
  constexpr int kPanel = 256 * kPanelBytes;
  for (int i = threadIdx.x; i < kPanels * kPanel / 2; i += blockDim.x) smem[i] = random_number(i);
  fence_smem_writes();
  __syncthreads();
  const int warpgroup = threadIdx.x / kWarpgroupThreads;
  const OperandDescriptor a(smem + warpgroup * 64 * 64, kPanel);
  const OperandDescriptor b(smem + kPanel, kPanel);
  uint32_t words[32];
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    words[i] = reinterpret_cast<const uint32_t*>(smem)[threadIdx.x + 128 * i];
  }
  float first[kN / 2] = {};
  float second[kN / 2] = {};
  const auto group = [&](float* acc, auto registers) {
    pin_registers<kN / 2>(acc);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const int bytes = k / 4 * kPanel + k % 4 * 32;
      if constexpr (decltype(registers)::value) {
        Wgmma<Element, kN>::template with_registers<Major::kMN>(acc, words + 4 * k,
                                                                b + k * 16 * kPanelBytes, 1);
      } else {
        // Accumulating throughout: what a later product overwrites, ptxas leaves out.
        Wgmma<Element, kN>::template with_smem<Major::kK, Major::kK>(acc, a + bytes, b + bytes, 1);
      }
    }
    wgmma_commit();
  };
  for (int i = 0; i < repeats; ++i) {
    group(first, std::bool_constant<kSource == Source::kRegisters>{});
    if (kN <= 128) {
      group(second, std::bool_constant<kSource != Source::kSmem>{});
      wgmma_wait<1>();
    } else {
      wgmma_wait<0>();
    }
    pin_registers<kN / 2>(first);
  }
  wgmma_wait<0>();
  pin_registers<kN / 2>(second);
  float sum = 0.0f;
  for (int i = 0; i < kN / 2; ++i) sum += first[i] + second[i];
  if (sum == 0.12345f) *sink = sum;
}

template <int kN, Source kSource, int kWarpgroups>
void measure_wgmma(const char* what, int multiprocessors, float* sink) {
  auto* const kernel = wgmma_kernel<kN, kSource, kWarpgroups>;
  constexpr int kSmem = kPanels * 256 * kPanelBytes;
  allow_smem(kernel, kSmem);
  const int repeats = 20000 * 128 / kN;
  const double time =
      milliseconds([&] { kernel<<<multiprocessors, 128 * kWarpgroups, kSmem>>>(repeats, sink); });
  const double groups = kN <= 128 ? 2.0 : 1.0;
  const double flops = 2.0 * 64 * kN * 16 * 8 * groups * repeats * kWarpgroups * multiprocessors;
  std::printf("wgmma %-10s n%-4d %d warpgroups %8.1f TFLOP/s\n", what, kN, kWarpgroups,
              flops / time * 1e-9);
}

// --- L2: one thread a CTA keeps a ring of twelve 16 KB boxes (128 rows of 64 columns) full.

constexpr int kBoxes = 12;
constexpr int kBoxBytes = 128 * kPanelBytes;

struct LoadParams {
  CUtensorMap map;
  int boxes;   // of the tensor
  int visits;  // of each CTA
  int shift;   // in boxes, from one CTA to the next
};

__global__ void __launch_bounds__(128, 1) load_kernel(const __grid_constant__ LoadParams params) {
  __shared__ Mbarrier full[kBoxes];
  if (threadIdx.x != 0) return;
  for (int i = 0; i < kBoxes; ++i) full[i].init(1);
  fence_barrier_init();
  const auto load = [&](int visit) {
    const int box = (visit + blockIdx.x * params.shift) % params.boxes;
    full[visit % kBoxes].arrive_expect(kBoxBytes);
    load_box(anyflash_smem + visit % kBoxes * kBoxBytes, params.map, {0, box * 128, 0, 0},
             full[visit % kBoxes].state(), L2Hint::kEvictLast);
  };
  for (int visit = 0; visit < kBoxes; ++visit) load(visit);
  for (int visit = 0; visit < params.visits; ++visit) {
    full[visit % kBoxes].wait(visit / kBoxes & 1);
    if (visit + kBoxes < params.visits) load(visit + kBoxes);
  }
}

// The same by pairs of CTAs: each loads half of every box, for both. A CTA refills a buffer when
// both have it: the other one's thread says so by an arrival here.
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(128, 1)
    multicast_kernel(const __grid_constant__ LoadParams params) {
  __shared__ Mbarrier full[kBoxes];
  __shared__ Mbarrier empty[kBoxes];
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  if (threadIdx.x == 0) {
    for (int i = 0; i < kBoxes; ++i) full[i].init(1);
    for (int i = 0; i < kBoxes; ++i) empty[i].init(2);
    fence_barrier_init();
  }
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
  if (threadIdx.x == 0) {
    const auto load = [&](int visit) {
      const int stage = visit % kBoxes;
      if (visit >= kBoxes) empty[stage].wait((visit / kBoxes + 1) & 1);
      const int box = (visit + blockIdx.x / 2 * params.shift) % params.boxes;
      full[stage].arrive_expect(kBoxBytes);
      asm volatile(
          "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
          ".multicast::cluster [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(
              smem_address(anyflash_smem + stage * kBoxBytes + rank * (kBoxBytes / 2))),
          "l"(&params.map), "r"(smem_address(full[stage].state())), "r"(0),
          "r"(box * 128 + static_cast<int>(rank) * 64), "r"(0), "r"(0),
          "h"(static_cast<uint16_t>(3))
          : "memory");
    };
    const auto release = [&](int stage) {
      for (uint32_t cta = 0; cta < 2; ++cta) {
        asm volatile(
            "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
            "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote];\n}\n" ::"r"(
                smem_address(empty[stage].state())),
            "r"(cta)
            : "memory");
      }
    };
    for (int visit = 0; visit < kBoxes; ++visit) load(visit);
    // A buffer is refilled some visits after its release, when the other CTA's has come, too.
    constexpr int kLag = kBoxes / 2;
    for (int visit = 0; visit < params.visits; ++visit) {
      full[visit % kBoxes].wait(visit / kBoxes & 1);
      release(visit % kBoxes);
      const int next = visit - kLag + kBoxes;
      if (visit >= kLag && next < params.visits) load(next);
    }
  }
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

void measure_loads(int multiprocessors, int megabytes, int shift, const void* data) {
  const int boxes = megabytes * 1024 * 1024 / kBoxBytes;
  TensorMapShape shape{};
  shape.dtype = DType::kBFloat16;
  shape.columns = 64;
  shape.rows = boxes * 128;
  shape.heads = 1;
  shape.batch = 1;
  shape.box_rows = 128;
  Strides stride;
  stride.row = 64;
  LoadParams params{};
  params.map = make_tensor_map(data, stride, shape);
  params.boxes = boxes;
  params.visits = 8192;
  params.shift = shift;
  allow_smem(load_kernel, kBoxes * kBoxBytes);
  allow_smem(multicast_kernel, kBoxes * kBoxBytes);
  const double bytes = 1.0 * kBoxBytes * params.visits * multiprocessors;
  const double single =
      milliseconds([&] { load_kernel<<<multiprocessors, 128, kBoxes * kBoxBytes>>>(params); });
  std::printf("TMA of %3d MB, CTAs %4d boxes apart        %7.2f TB/s into shared memory\n",
              megabytes, shift, bytes / single * 1e-9);
  shape.box_rows = 64;
  params.map = make_tensor_map(data, stride, shape);
  const double both =
      milliseconds([&] { multicast_kernel<<<multiprocessors, 128, kBoxes * kBoxBytes>>>(params); });
  std::printf("TMA of %3d MB, pairs %3d boxes apart, multicast %5.2f TB/s into shared memory\n",
              megabytes, shift, bytes / both * 1e-9);
}

// --- Bulk reductions of float32 from shared memory, 16 KB each.

__global__ void __launch_bounds__(128, 1)
    reduce_kernel(float* target, int64_t pieces, int shift, int visits) {
  constexpr int kBytes = 16384;
  if (threadIdx.x != 0) return;
  for (int visit = 0; visit < visits; ++visit) {
    float* const to = target + (visit + int64_t{blockIdx.x} * shift) % pieces * (kBytes / 4);
    asm volatile(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
        "r"(smem_address(anyflash_smem) + visit % 4 * kBytes), "r"(kBytes)
        : "memory");
    commit_stores();
    asm volatile("cp.async.bulk.wait_group.read 3;" ::: "memory");
  }
  wait_stores();
}

void measure_reduce(int multiprocessors, int megabytes, int shift, void* data) {
  constexpr int kVisits = 8192;
  allow_smem(reduce_kernel, 65536);
  const double time = milliseconds([&] {
    reduce_kernel<<<multiprocessors, 128, 65536>>>(
        static_cast<float*>(data), int64_t{megabytes} * 1024 * 1024 / 16384, shift, kVisits);
  });
  const double bytes = 16384.0 * kVisits * multiprocessors;
  std::printf("bulk add.f32 to %3d MB, CTAs %3d pieces apart %8.1f GB/s, %.1f GB/s an SM\n",
              megabytes, shift, bytes / time * 1e-6, bytes / time * 1e-6 / multiprocessors);
}

// --- ex2

template <bool kHalf>
__global__ void __launch_bounds__(512, 1) ex2_kernel(int repeats, float* sink) {
  uint32_t x[8];
  for (int i = 0; i < 8; ++i) x[i] = threadIdx.x + i;
  for (int r = 0; r < repeats; ++r) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (kHalf) asm volatile("ex2.approx.f16x2 %0, %0;" : "+r"(x[i]));
      else asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+r"(x[i]));
    }
  }
  uint32_t sum = 0;
  for (int i = 0; i < 8; ++i) sum += x[i];
  if (sum == 12345u) *sink = 1.0f;
}

template <bool kHalf>
void measure_ex2(int multiprocessors, float* sink) {
  constexpr int kRepeats = 100000;
  const double time =
      milliseconds([&] { ex2_kernel<kHalf><<<multiprocessors, 512>>>(kRepeats, sink); });
  const double numbers = 8.0 * kRepeats * 512 * multiprocessors * (kHalf ? 2 : 1);
  std::printf("ex2.%-6s %8.1f G numbers/s, %.2f an SM and ns\n", kHalf ? "f16x2" : "f32",
              numbers / time * 1e-6, numbers / time * 1e-6 / multiprocessors);
}

// --- Host

void measure_maps(const void* data) {
  TensorMapShape shape{};
  shape.dtype = DType::kBFloat16;
  shape.columns = 128;
  shape.rows = 4096;
  shape.heads = 16;
  shape.batch = 4;
  shape.box_rows = 128;
  Strides stride;
  stride.row = 2048;
  stride.head = 128;
  stride.batch = 4096 * 2048;
  constexpr int kCount = 100000;
  unsigned char sum = 0;
  for (int turn = 0; turn < 2; ++turn) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < kCount; ++i) {
      const CUtensorMap map = make_tensor_map(data, stride, shape);
      sum += reinterpret_cast<const unsigned char*>(&map)[i % 64];
    }
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
    if (turn == 1) {
      std::printf("cuTensorMapEncodeTiled %.3f us (%d)\n", time.count() * 1e6 / kCount, sum % 2);
    }
  }
}

}  // namespace

int main() {
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, 0));
  const int sms = properties.multiProcessorCount;
  std::printf("%s, %d SMs, %d MB L2\n", properties.name, sms, properties.l2CacheSize >> 20);
  void* data = nullptr;
  constexpr int64_t kBytes = int64_t{128} << 20;
  check(cudaMalloc(&data, kBytes));
  fill<<<1024, 256>>>(static_cast<__nv_bfloat16*>(data), kBytes / 2);
  check(cudaDeviceSynchronize());
  auto* const sink = static_cast<float*>(data);

  measure_wgmma<64, Source::kSmem, 2>("SS", sms, sink);
  measure_wgmma<80, Source::kSmem, 2>("SS", sms, sink);
  measure_wgmma<128, Source::kSmem, 1>("SS", sms, sink);
  measure_wgmma<128, Source::kSmem, 2>("SS", sms, sink);
  measure_wgmma<256, Source::kSmem, 2>("SS", sms, sink);
  measure_wgmma<64, Source::kRegisters, 2>("RS", sms, sink);
  measure_wgmma<128, Source::kRegisters, 1>("RS", sms, sink);
  measure_wgmma<128, Source::kRegisters, 2>("RS", sms, sink);
  measure_wgmma<256, Source::kRegisters, 2>("RS", sms, sink);
  measure_wgmma<64, Source::kAttention, 2>("SS + RS", sms, sink);
  measure_wgmma<64, Source::kAttention, 3>("SS + RS", sms, sink);
  measure_wgmma<128, Source::kAttention, 1>("SS + RS", sms, sink);
  measure_wgmma<128, Source::kAttention, 2>("SS + RS", sms, sink);
  for (const int megabytes : {4, 16, 32}) {
    measure_loads(sms, megabytes, 0, data);
    measure_loads(sms, megabytes, 7, data);
  }
  measure_loads(sms, 128, 61, data);  // more than the cache holds
  measure_reduce(sms, 16, 0, data);
  measure_reduce(sms, 16, 7, data);
  measure_ex2<false>(sms, sink);
  measure_ex2<true>(sms, sink);
  measure_maps(data);
  check(cudaDeviceSynchronize());
  return 0;
}
