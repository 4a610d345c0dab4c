// Runs forward() on the emulated GPU and compares with float64: the program behind the sanitizer
// and mutation tests, where Python cannot be the host.
//
//   emulated_driver < cases        one case a line:
//   dtype batch seqlen_q seqlen_k heads heads_k head_dim head_dim_v causal scale seed
//
// dtype is fp16 or bf16, causal 0 or 1, seed decides values and the emulator's schedule. Every
// tensor is a heap block of its exact size, so that Address Sanitizer sees each access beyond it.
// Exit status 0: all cases are right.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <iostream>
#include <memory>
#include <new>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "anyflash/attention.h"
#include "emu.hpp"

namespace {

using anyflash::DType;
using anyflash::TensorView;

struct Case {
  std::string dtype;
  int64_t batch, seqlen_q, seqlen_k, heads, heads_k, head_dim, head_dim_v;
  int causal;
  double scale;
  unsigned seed;
};

uint16_t to_bits(float x, DType dtype) {
  if (dtype == DType::kFloat16) return __half_as_ushort(__float2half_rn(x));
  return __bfloat16_as_ushort(__float2bfloat16_rn(x));
}

float from_bits(uint16_t bits, DType dtype) {
  if (dtype == DType::kFloat16) return __half2float(__ushort_as_half(bits));
  return __bfloat162float(__ushort_as_bfloat16(bits));
}

// A (batch, rows, heads, columns) tensor in a block of its exact size.
struct Tensor {
  std::unique_ptr<uint16_t[]> data;
  TensorView view;

  Tensor(DType dtype, int64_t batch, int64_t rows, int64_t heads, int64_t columns)
      : data(new uint16_t[static_cast<std::size_t>(batch * rows * heads * columns)]) {
    view.data = data.get();
    view.dtype = dtype;
    view.device = {anyflash::DeviceType::kCuda, 0};
    view.rank = 4;
    view.shape = {batch, rows, heads, columns};
    view.stride = {rows * heads * columns, heads * columns, columns, 1};
  }
  int64_t size() const { return view.shape[0] * view.stride[0]; }
  double at(int64_t b, int64_t row, int64_t head, int64_t col) const {
    const auto& s = view.stride;
    return from_bits(data[static_cast<std::size_t>(b * s[0] + row * s[1] + head * s[2] + col)],
                     view.dtype);
  }
};

void fill(Tensor& tensor, std::mt19937& random) {
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < tensor.size(); ++i) {
    tensor.data[static_cast<std::size_t>(i)] = to_bits(normal(random), tensor.view.dtype);
  }
}

// Largest deviation of one row of the output, relative to what rounding allows; 1 is the limit.
double check_row(const Case& c, const Tensor& q, const Tensor& k, const Tensor& v,
                 const Tensor& out, float lse, int64_t b, int64_t i, int64_t h) {
  const int64_t head_k = h / (c.heads / c.heads_k);
  std::vector<double> scores;
  double maximum = -INFINITY;
  for (int64_t j = 0; j < c.seqlen_k; ++j) {
    if (c.causal != 0 && j > i + c.seqlen_k - c.seqlen_q) break;
    double score = 0;
    for (int64_t x = 0; x < c.head_dim; ++x) score += q.at(b, i, h, x) * k.at(b, j, head_k, x);
    scores.push_back(score * c.scale);
    maximum = std::max(maximum, scores.back());
  }
  double sum = 0;
  for (double& score : scores) sum += score = std::exp(score - maximum);
  const double expected_lse = scores.empty() ? -INFINITY : maximum + std::log(sum);
  double worst = scores.empty()
                     ? (lse == expected_lse ? 0 : INFINITY)
                     : std::abs(lse - expected_lse) / (1e-5 * (1 + std::abs(expected_lse)));
  const double epsilon = c.dtype == "fp16" ? 0x1p-11 : 0x1p-8;
  for (int64_t x = 0; x < c.head_dim_v; ++x) {
    double value = 0, size = 0;
    for (std::size_t j = 0; j < scores.size(); ++j) {
      const double term = scores[j] / sum * v.at(b, static_cast<int64_t>(j), head_k, x);
      value += term;
      size += std::abs(term);
    }
    const double error = std::abs(out.at(b, i, h, x) - value);
    // P and the result are rounded once each; fp32 sums and exp2 add little.
    worst =
        std::max(worst, scores.empty() ? (error == 0 ? 0 : INFINITY)
                                       : error / (1.5 * epsilon * (size + std::abs(value)) + 1e-6));
    if (std::isnan(error)) return INFINITY;
  }
  return std::isnan(worst) ? INFINITY : worst;
}

double run(const Case& c) {
  emu::options().seed = c.seed;
  const DType dtype = c.dtype == "fp16" ? DType::kFloat16 : DType::kBFloat16;
  std::mt19937 random(c.seed);
  Tensor q(dtype, c.batch, c.seqlen_q, c.heads, c.head_dim);
  Tensor k(dtype, c.batch, c.seqlen_k, c.heads_k, c.head_dim);
  Tensor v(dtype, c.batch, c.seqlen_k, c.heads_k, c.head_dim_v);
  Tensor out(dtype, c.batch, c.seqlen_q, c.heads, c.head_dim_v);
  for (Tensor* tensor : {&q, &k, &v}) fill(*tensor, random);
  for (int64_t i = 0; i < out.size(); ++i) out.data[static_cast<std::size_t>(i)] = 0x7fff;  // NaN
  const int64_t rows = c.batch * c.heads * c.seqlen_q;
  const std::unique_ptr<float[]> lse(new float[static_cast<std::size_t>(rows)]);
  TensorView lse_view = q.view;
  lse_view.data = lse.get();
  lse_view.dtype = DType::kFloat32;
  lse_view.rank = 3;
  lse_view.shape = {c.batch, c.heads, c.seqlen_q};
  lse_view.stride = {c.heads * c.seqlen_q, c.seqlen_q, 1};

  anyflash::ForwardOptions options;
  options.causal = c.causal != 0;
  options.softmax_scale = c.scale;
  const std::size_t bytes =
      anyflash::forward_workspace_size(q.view, k.view, v.view, out.view, &lse_view, options);
  struct Free {
    void operator()(char* p) const { ::operator delete(p, std::align_val_t{256}); }
  };
  const std::unique_ptr<char, Free> workspace(
      static_cast<char*>(::operator new(bytes, std::align_val_t{256})));
  anyflash::forward(q.view, k.view, v.view, out.view, &lse_view, options, {workspace.get(), bytes});

  double worst = 0;
  for (int64_t b = 0; b < c.batch; ++b) {
    for (int64_t h = 0; h < c.heads; ++h) {
      for (int64_t i = 0; i < c.seqlen_q; ++i) {
        const float row_lse = lse[static_cast<std::size_t>((b * c.heads + h) * c.seqlen_q + i)];
        worst = std::max(worst, check_row(c, q, k, v, out, row_lse, b, i, h));
      }
    }
  }
  return worst;
}

}  // namespace

int main() {
  int wrong = 0;
  std::string line;
  while (std::getline(std::cin, line)) {
    std::istringstream words(line);
    Case c;
    words >> c.dtype >> c.batch >> c.seqlen_q >> c.seqlen_k >> c.heads >> c.heads_k >> c.head_dim >>
        c.head_dim_v >> c.causal >> c.scale >> c.seed;
    if (!words || (c.dtype != "fp16" && c.dtype != "bf16")) {
      std::fprintf(stderr, "not a case: %s\n", line.c_str());
      return 2;
    }
    try {
      const double worst = run(c);
      std::printf("%s %s: %.3f of the allowed error\n", worst <= 1 ? "ok   " : "WRONG",
                  line.c_str(), worst);
      wrong += worst > 1;
    } catch (const std::exception& error) {
      std::printf("WRONG %s: %s\n", line.c_str(), error.what());
      ++wrong;
    }
  }
  return wrong == 0 ? 0 : 1;
}
