#include "model.h"

#include <charconv>
#include <cmath>
#include <initializer_list>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace {

// y[t] = matrix x[t], matrix (rows, columns).
std::vector<float> product(const Weight& matrix, const std::vector<float>& x) {
  const auto rows = static_cast<std::size_t>(matrix.shape[0]);
  const auto columns = static_cast<std::size_t>(matrix.shape[1]);
  const std::size_t tokens = x.size() / columns;
  std::vector<float> y(tokens * rows);
  for (std::size_t t = 0; t < tokens; ++t) {
    for (std::size_t r = 0; r < rows; ++r) {
      float sum = 0;
      for (std::size_t c = 0; c < columns; ++c) {
        sum += matrix.data[r * columns + c] * x[t * columns + c];
      }
      y[t * rows + r] = sum;
    }
  }
  return y;
}

std::vector<float> normalized(const Weight& weight, const std::vector<float>& x) {
  const std::size_t columns = weight.data.size();
  std::vector<float> y(x.size());
  for (std::size_t row = 0; row < x.size(); row += columns) {
    float squares = 0;
    for (std::size_t c = 0; c < columns; ++c) squares += x[row + c] * x[row + c];
    const float factor = 1 / std::sqrt(squares / static_cast<float>(columns) + 1e-5F);
    for (std::size_t c = 0; c < columns; ++c) y[row + c] = x[row + c] * factor * weight.data[c];
  }
  return y;
}

void add(std::vector<float>& x, const std::vector<float>& y) {
  for (std::size_t i = 0; i < x.size(); ++i) x[i] += y[i];
}

// A contiguous tensor on the CPU. The library reads inputs through the same pointer type.
anyflash::TensorView view(const void* data, anyflash::DType dtype,
                          std::initializer_list<int64_t> shape) {
  anyflash::TensorView view;
  view.data = const_cast<void*>(data);
  view.dtype = dtype;
  view.rank = static_cast<int>(shape.size());
  int64_t stride = 1;
  for (int i = view.rank - 1; i >= 0; --i) {
    view.shape[i] = shape.begin()[i];
    view.stride[i] = stride;
    stride *= view.shape[i];
  }
  return view;
}

anyflash::TensorView floats(const std::vector<float>& data, std::initializer_list<int64_t> shape) {
  return view(data.data(), anyflash::DType::kFloat32, shape);
}

}  // namespace

anyflash::Workspace WorkspaceMemory::of(std::size_t bytes) {
  if (memory_.size() < bytes) memory_.resize(bytes);
  return {memory_.data(), bytes};
}

Model::Model(const std::string& path) {
  SafeTensors file = read_safetensors(path);
  // The file is not to be trusted: sizes that are not 1 or more would divide by 0 or overflow.
  const auto number = [&](const std::string& key, int64_t most) {
    const std::string& text = file.metadata[key];
    int64_t value = 0;
    const auto end = text.data() + text.size();
    const auto [read, error] = std::from_chars(text.data(), end, value);
    if (error != std::errc() || read != end || value < 1 || value > most) {
      throw std::runtime_error(path + ": " + key + " is \"" + text + "\"; 1 to " +
                               std::to_string(most) + " is allowed");
    }
    return value;
  };
  const auto take = [&](const std::string& name, std::vector<int64_t> shape) {
    const auto found = file.weights.find(name);
    if (found == file.weights.end()) throw std::runtime_error(path + " has no " + name);
    Weight& weight = found->second;
    if (shape.size() != weight.shape.size()) throw std::runtime_error(name + ": wrong rank");
    for (std::size_t i = 0; i < shape.size(); ++i) {
      if (weight.shape[i] < 1) throw std::runtime_error(name + " is empty");
      if (shape[i] >= 0 && shape[i] != weight.shape[i]) {
        throw std::runtime_error(name + ": wrong shape");
      }
    }
    return std::move(weight);
  };
  embedding_ = take("embedding", {-1, -1});
  width_ = embedding_.shape[1];
  heads_ = number("heads", width_);
  heads_k_ = number("heads_k", heads_);
  if (width_ % heads_ != 0) throw std::runtime_error("heads do not divide the width");
  head_dim_ = width_ / heads_;
  rotary_cos_ = take("rotary_cos", {-1, head_dim_ / 2});
  positions_ = rotary_cos_.shape[0];
  rotary_sin_ = take("rotary_sin", {positions_, head_dim_ / 2});
  norm_ = take("norm", {width_});
  const int64_t layers = number("layers", static_cast<int64_t>(file.weights.size()));
  for (int64_t i = 0; i < layers; ++i) {
    const std::string prefix = std::to_string(i) + ".";
    Layer layer;
    layer.norm_attention = take(prefix + "norm_attention", {width_});
    layer.q = take(prefix + "q", {width_, width_});
    layer.k = take(prefix + "k", {heads_k_ * head_dim_, width_});
    layer.v = take(prefix + "v", {heads_k_ * head_dim_, width_});
    layer.o = take(prefix + "o", {width_, width_});
    layer.norm_mlp = take(prefix + "norm_mlp", {width_});
    layer.gate = take(prefix + "gate", {-1, width_});
    layer.up = take(prefix + "up", layer.gate.shape);
    layer.down = take(prefix + "down", {width_, layer.gate.shape[0]});
    layer.k_cache.resize(static_cast<std::size_t>(positions_ * heads_k_ * head_dim_));
    layer.v_cache.resize(layer.k_cache.size());
    layers_.push_back(std::move(layer));
  }
}

// x += o attention(rotated q, rotated k and v of the whole text)
void Model::attention(Layer& layer, std::vector<float>& x, int64_t tokens) {
  const std::vector<float> y = normalized(layer.norm_attention, x);
  const std::vector<float> q = product(layer.q, y);
  const std::vector<float> k = product(layer.k, y);
  const std::vector<float> v = product(layer.v, y);
  std::vector<float> result(q.size());

  anyflash::KvCacheTensors tensors;
  tensors.q = floats(q, {1, tokens, heads_, head_dim_});
  tensors.k_cache = floats(layer.k_cache, {1, positions_, heads_k_, head_dim_});
  tensors.v_cache = floats(layer.v_cache, {1, positions_, heads_k_, head_dim_});
  tensors.out = floats(result, {1, tokens, heads_, head_dim_});
  const auto k_new = floats(k, {1, tokens, heads_k_, head_dim_});
  const auto v_new = floats(v, {1, tokens, heads_k_, head_dim_});
  const auto length = view(&length_, anyflash::DType::kInt32, {1});
  const auto cos = floats(rotary_cos_.data, {positions_, head_dim_ / 2});
  const auto sin = floats(rotary_sin_.data, {positions_, head_dim_ / 2});

  anyflash::ForwardOptions options;
  options.causal = true;
  anyflash::KvCacheOptions cache;  // appends k and v, rotates q and k, and then attends
  cache.cache_seqlens = &length;
  cache.k_new = &k_new;
  cache.v_new = &v_new;
  cache.rotary_cos = &cos;
  cache.rotary_sin = &sin;
  cache.rotary_interleaved = false;
  const anyflash::KvCachePlan plan(tensors, options, cache);
  plan.run(workspace_.of(plan.workspace_bytes()));
  add(x, product(layer.o, result));
}

std::vector<float> Model::forward(const std::vector<int32_t>& tokens) {
  const auto count = static_cast<int64_t>(tokens.size());
  if (count > positions_ - length_) throw std::runtime_error("the text is too long for the model");
  std::vector<float> x;
  for (const int32_t token : tokens) {
    if (token < 0 || token >= embedding_.shape[0])
      throw std::runtime_error("there is no such token");
    const auto row = embedding_.data.begin() + token * width_;
    x.insert(x.end(), row, row + width_);
  }
  for (Layer& layer : layers_) {
    attention(layer, x, count);
    const std::vector<float> y = normalized(layer.norm_mlp, x);
    std::vector<float> gate = product(layer.gate, y);
    const std::vector<float> up = product(layer.up, y);
    for (std::size_t i = 0; i < gate.size(); ++i) gate[i] *= up[i] / (1 + std::exp(-gate[i]));
    add(x, product(layer.down, gate));
  }
  length_ += static_cast<int32_t>(count);
  return product(embedding_, normalized(norm_, x));
}
