// A case of the emulated driver and its tensors. Every tensor is a heap block of its exact size, so
// that Address Sanitizer sees each access beyond it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "anyflash/attention.h"

namespace driver {

using anyflash::DType;
using anyflash::TensorView;

inline DType dtype_of(const std::string& name) {
  if (name == "fp16") return DType::kFloat16;
  if (name == "bf16") return DType::kBFloat16;
  if (name == "fp32") return DType::kFloat32;
  if (name == "bool") return DType::kBool;
  throw std::invalid_argument("no data type: " + name);
}

inline int64_t bytes_of(DType dtype) {
  if (dtype == DType::kBool) return 1;
  return dtype == DType::kFloat16 || dtype == DType::kBFloat16 ? 2 : 4;
}

// A tensor of up to four axes; it is always addressed by four indices, of which the first axes are
// 0 where it has fewer. Axes of extent 1 take any index.
class Tensor {
 public:
  Tensor(DType dtype, const std::array<int64_t, 4>& extent)
      : dtype_(dtype), extent_(extent), bytes_(static_cast<std::size_t>(size() * bytes_of(dtype))) {
    data_.reset(new unsigned char[bytes_]);
    std::memset(data_.get(), 0xff, bytes_);  // NaN
  }

  int64_t size() const { return extent_[0] * extent_[1] * extent_[2] * extent_[3]; }

  // The last `rank` axes.
  TensorView view(int rank) const {
    TensorView view;
    view.data = data_.get();
    view.dtype = dtype_;
    view.device = {anyflash::DeviceType::kCuda, 0};
    view.rank = rank;
    int64_t stride = 1;
    for (int axis = 3; axis >= 4 - rank; --axis) {
      const auto from = static_cast<std::size_t>(axis);
      const auto to = static_cast<std::size_t>(axis - (4 - rank));
      view.shape[to] = extent_[from];
      view.stride[to] = stride;
      stride *= extent_[from];
    }
    return view;
  }

  double at(int64_t a, int64_t b, int64_t c, int64_t d) const { return get(index(a, b, c, d)); }

  double get(int64_t i) const {
    switch (dtype_) {
      case DType::kFloat16:
        return __half2float(__ushort_as_half(element<uint16_t>(i)));
      case DType::kBFloat16:
        return __bfloat162float(__ushort_as_bfloat16(element<uint16_t>(i)));
      case DType::kFloat32:
        return element<float>(i);
      case DType::kInt32:
        return element<int32_t>(i);
      default:
        return data_[static_cast<std::size_t>(i)];
    }
  }

  void set(int64_t i, double x) {
    const auto value = static_cast<float>(x);
    switch (dtype_) {
      case DType::kFloat16:
        return put(i, __half_as_ushort(__float2half_rn(value)));
      case DType::kBFloat16:
        return put(i, __bfloat16_as_ushort(__float2bfloat16_rn(value)));
      case DType::kFloat32:
        return put(i, value);
      case DType::kInt32:
        return put(i, static_cast<int32_t>(x));
      default:
        data_[static_cast<std::size_t>(i)] = x != 0;
    }
  }

  int64_t index(int64_t a, int64_t b, int64_t c, int64_t d) const {
    const std::array<int64_t, 4> at{a, b, c, d};
    int64_t result = 0;
    for (std::size_t axis = 0; axis < 4; ++axis) {
      result = result * extent_[axis] + (extent_[axis] == 1 ? 0 : at[axis]);
    }
    return result;
  }

 private:
  template <class T>
  T element(int64_t i) const {
    T value;
    std::memcpy(&value, data_.get() + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
    return value;
  }
  template <class T>
  void put(int64_t i, T value) {
    std::memcpy(data_.get() + i * static_cast<int64_t>(sizeof(T)), &value, sizeof(T));
  }

  DType dtype_;
  std::array<int64_t, 4> extent_;
  std::size_t bytes_;
  std::unique_ptr<unsigned char[]> data_;
};

// One line; driver.cpp says what its words mean.
struct Case {
  std::string dtype;
  int64_t batch, seqlen_q, seqlen_k, heads, heads_k, head_dim, head_dim_v;
  int causal;
  double scale;
  unsigned seed;

  int64_t left = -1, right = -1;
  double softcap = 0, alibi = 0, dropout = 0;
  std::string bias, bias_axes = "bhqk";
  std::vector<int64_t> block;
  bool sink = false;
  std::string out;
  std::vector<int64_t> cu_q, cu_k, used;
  std::string nan;

  explicit Case(const std::string& line) {
    std::istringstream words(line);
    words >> dtype >> batch >> seqlen_q >> seqlen_k >> heads >> heads_k >> head_dim >> head_dim_v >>
        causal >> scale >> seed;
    if (!words || (dtype != "fp16" && dtype != "bf16")) throw std::invalid_argument("no case");
    out = dtype;
    std::string word;
    while (words >> word) read(word);
    if (!cu_q.empty()) batch = static_cast<int64_t>(cu_q.size()) - 1;
  }

  bool packed() const { return !cu_q.empty(); }

 private:
  static std::vector<int64_t> list(const std::string& text) {
    std::vector<int64_t> numbers;
    std::istringstream stream(text);
    for (std::string number; std::getline(stream, number, ',');) {
      numbers.push_back(std::stoll(number));
    }
    return numbers;
  }

  void read(const std::string& word) {
    const std::size_t equals = word.find('=');
    const std::string key = word.substr(0, equals);
    const std::string value = equals == std::string::npos ? "" : word.substr(equals + 1);
    if (key == "left") left = std::stoll(value);
    else if (key == "right") right = std::stoll(value);
    else if (key == "softcap") softcap = std::stod(value);
    else if (key == "alibi") alibi = std::stod(value);
    else if (key == "dropout") dropout = std::stod(value);
    else if (key == "bias") bias = value;
    else if (key == "bias_axes") bias_axes = value;
    else if (key == "block") block = list(value);
    else if (key == "sink") sink = value == "1";
    else if (key == "out") out = value;
    else if (key == "cu_q") cu_q = list(value);
    else if (key == "cu_k") cu_k = list(value);
    else if (key == "used") used = list(value);
    else if (key == "nan") nan = value;
    else throw std::invalid_argument("no option: " + word);
  }
};

// Where a sequence's rows lie, and how many there are; of `all_keys` so many `keys` are in use.
struct Sequence {
  int64_t batch, first_q, first_k, queries, keys, all_keys;
};

class Problem {
 public:
  explicit Problem(const Case& problem)
      : c(problem),
        max_q(longest(c.cu_q, c.seqlen_q)),
        max_k(longest(c.cu_k, c.seqlen_k)),
        q(dtype_of(c.dtype), {tensors(), c.seqlen_q, c.heads, c.head_dim}),
        k(dtype_of(c.dtype), {tensors(), c.seqlen_k, c.heads_k, c.head_dim}),
        v(dtype_of(c.dtype), {tensors(), c.seqlen_k, c.heads_k, c.head_dim_v}),
        out(dtype_of(c.out), {tensors(), c.seqlen_q, c.heads, c.head_dim_v}),
        lse(DType::kFloat32, {1, tensors(), c.heads, c.seqlen_q}),
        max_logits(DType::kFloat32, {1, 1, c.batch, c.heads}) {
    std::mt19937 random(c.seed);
    std::normal_distribution<double> normal;
    for (Tensor* tensor : {&q, &k, &v}) {
      for (int64_t i = 0; i < tensor->size(); ++i) tensor->set(i, normal(random));
    }
    make_vectors();
    if (!c.bias.empty()) make_bias(random);
    if (!c.block.empty()) make_block_mask(random);
    if (c.dropout > 0) dropout_mask.emplace(DType::kBool, extent(c.batch, c.heads, max_q, max_k));
  }

  Sequence sequence(int64_t b) const {
    const auto at = static_cast<std::size_t>(b);
    Sequence s{b, 0, 0, c.seqlen_q, c.seqlen_k, c.seqlen_k};
    if (c.packed()) {
      s = {0, c.cu_q[at], c.cu_k[at], c.cu_q[at + 1] - c.cu_q[at], 0, c.cu_k[at + 1] - c.cu_k[at]};
    }
    s.keys = c.used.empty() ? s.all_keys : c.used[at];
    return s;
  }

  // Runs forward().
  void forward(const std::array<uint64_t, 2>& rng) {
    const int rank = c.packed() ? 3 : 4;
    anyflash::ForwardOptions options;
    options.softmax_scale = c.scale;
    options.causal = c.causal != 0;
    options.window_left = c.left;
    options.window_right = c.right;
    options.softcap = c.softcap;
    options.dropout_p = c.dropout;
    options.seed = rng[0];
    options.offset = rng[1];
    if (!c.block.empty()) options.block_size = {c.block[0], c.block[1]};
    options.max_seqlen_q = c.packed() ? max_q : 0;
    options.max_seqlen_k = c.packed() ? max_k : 0;
    std::array<TensorView, 9> views;
    std::size_t used = 0;
    const auto give = [&](const TensorView*& option, const std::optional<Tensor>& tensor, int r) {
      if (!tensor) return;
      views[used] = tensor->view(r);
      option = &views[used++];
    };
    give(options.alibi_slopes, slopes, 2);
    give(options.bias, bias, 4);
    give(options.block_mask, block_mask, 4);
    give(options.sinks, sinks, 1);
    give(options.cu_seqlens_q, cu_q, 1);
    give(options.cu_seqlens_k, cu_k, 1);
    give(options.seqused_k, seqused_k, 1);
    give(options.dropout_mask, dropout_mask, 4);
    const TensorView logits = max_logits.view(2);
    options.max_logits = &logits;
    launch(rank, options);
  }

  Case c;
  int64_t max_q, max_k;
  Tensor q, k, v, out, lse, max_logits;
  std::optional<Tensor> slopes, bias, block_mask, sinks, cu_q, cu_k, seqused_k, dropout_mask;

 private:
  static std::array<int64_t, 4> extent(int64_t a, int64_t b, int64_t x, int64_t y) {
    return {a, b, x, y};
  }

  // Packed tensors have no batch axis.
  int64_t tensors() const { return c.packed() ? 1 : c.batch; }

  static int64_t longest(const std::vector<int64_t>& cu, int64_t otherwise) {
    int64_t length = cu.empty() ? otherwise : 0;
    for (std::size_t b = 1; b < cu.size(); ++b) length = std::max(length, cu[b] - cu[b - 1]);
    return length;
  }

  static void make_vector(std::optional<Tensor>& tensor, const std::vector<int64_t>& values) {
    if (values.empty()) return;
    tensor.emplace(DType::kInt32, extent(1, 1, 1, static_cast<int64_t>(values.size())));
    for (std::size_t i = 0; i < values.size(); ++i) {
      tensor->set(static_cast<int64_t>(i), static_cast<double>(values[i]));
    }
  }

  void make_vectors() {
    make_vector(cu_q, c.cu_q);
    make_vector(cu_k, c.cu_k);
    make_vector(seqused_k, c.used);
    if (c.alibi != 0) {
      slopes.emplace(DType::kFloat32, extent(1, 1, c.batch, c.heads));
      for (int64_t i = 0; i < slopes->size(); ++i) slopes->set(i, c.alibi / (1.0 + double(i)));
    }
    if (c.sink) {
      sinks.emplace(DType::kFloat32, extent(1, 1, 1, c.heads));
      for (int64_t i = 0; i < c.heads; ++i) sinks->set(i, i % 2 == 0 ? 3.0 : -1.0);
    }
  }

  // Random numbers; a tenth of them, and every seventh key from the third on, hide.
  void make_bias(std::mt19937& random) {
    const std::array<int64_t, 4> full{c.batch, c.heads, max_q, max_k};
    std::array<int64_t, 4> axes{};
    for (std::size_t i = 0; i < 4; ++i) axes[i] = c.bias_axes.at(i) == '1' ? 1 : full[i];
    bias.emplace(dtype_of(c.bias), axes);
    std::normal_distribution<double> normal;
    std::bernoulli_distribution hidden(0.1);
    for (int64_t i = 0; i < bias->size(); ++i) {
      const double x = normal(random);
      const bool hides = hidden(random) || (axes[3] > 1 && i % axes[3] % 7 == 3);
      if (c.bias == "bool") bias->set(i, hides ? 0 : 1);
      else bias->set(i, hides ? -INFINITY : x);
    }
  }

  void make_block_mask(std::mt19937& random) {
    const auto blocks = [](int64_t n, int64_t size) { return (n + size - 1) / size; };
    block_mask.emplace(DType::kBool, extent(c.batch, c.heads, blocks(max_q, c.block.at(0)),
                                            blocks(max_k, c.block.at(1))));
    std::bernoulli_distribution kept(0.6);
    for (int64_t i = 0; i < block_mask->size(); ++i) block_mask->set(i, kept(random) ? 1 : 0);
  }

  void launch(int rank, const anyflash::ForwardOptions& options) {
    const TensorView lse_view = lse.view(rank - 1);
    const auto views = {q.view(rank), k.view(rank), v.view(rank), out.view(rank)};
    const TensorView* const t = views.begin();
    const std::size_t bytes =
        anyflash::forward_workspace_size(t[0], t[1], t[2], t[3], &lse_view, options);
    struct Free {
      void operator()(char* p) const { ::operator delete(p, std::align_val_t{256}); }
    };
    const std::unique_ptr<char, Free> workspace(
        static_cast<char*>(::operator new(bytes, std::align_val_t{256})));
    anyflash::forward(t[0], t[1], t[2], t[3], &lse_view, options, {workspace.get(), bytes});
  }
};

}  // namespace driver
