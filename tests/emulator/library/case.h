// A case of the emulated driver.
#pragma once

#include <cstdint>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace driver {

// One line; driver.cpp says what its words mean.
struct Case {
  std::string dtype;
  int64_t batch, seqlen_q, seqlen_k, heads, heads_k, head_dim, head_dim_v;
  int causal;
  double scale;
  unsigned seed;

  int64_t left = -1, right = -1;
  std::optional<int64_t> diagonal, split, merge;
  double softcap = 0, alibi = 0, dropout = 0;
  std::string bias, bias_axes = "bhqk";
  std::vector<int64_t> block, ranges;
  bool shared_slopes = false, sink = false;
  std::string out;
  std::vector<int64_t> cu_q, cu_k, used;
  std::string nan;

  // Of the backward.
  bool backward = false, deterministic = false, dlse = false, keyless = false;
  bool accumulate = false;
  std::string dout, grad;  // types, the inputs' own if not given
  std::string small = "own";
  int schedule = -1;
  std::size_t smem = 166912;
  int gpu = 80, multiprocessors = 108;

  // Of decoding.
  bool decode = false, batch_idx = false, hole = false, tree = false, halves = false;
  bool latent = false, ragged = false;
  std::vector<int64_t> filled, leftpad, rotary_seqlens;
  int64_t page = 0, new_keys = 0, rotary = 0, splits = 0, split_size = 0;
  std::string cache, scales;

  explicit Case(const std::string& line) {
    std::istringstream words(line);
    words >> dtype >> batch >> seqlen_q >> seqlen_k >> heads >> heads_k >> head_dim >> head_dim_v >>
        causal >> scale >> seed;
    if (!words || (dtype != "fp16" && dtype != "bf16")) throw std::invalid_argument("no case");
    out = dout = grad = cache = dtype;
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
    else if (key == "diagonal") diagonal = std::stoll(value);
    else if (key == "split") split = std::stoll(value);
    else if (key == "merge") merge = std::stoll(value);
    else if (key == "softcap") softcap = std::stod(value);
    else if (key == "alibi") alibi = std::stod(value);
    else if (key == "shared_slopes") shared_slopes = value == "1";
    else if (key == "dropout") dropout = std::stod(value);
    else if (key == "bias") bias = value;
    else if (key == "bias_axes") bias_axes = value;
    else if (key == "block") block = list(value);
    else if (key == "ranges") ranges = list(value);
    else if (key == "sink") sink = value == "1";
    else if (key == "out") out = value;
    else if (key == "cu_q") cu_q = list(value);
    else if (key == "cu_k") cu_k = list(value);
    else if (key == "used") used = list(value);
    else if (key == "nan") nan = value;
    else if (word == "op=backward") backward = true;
    else if (key == "det") deterministic = value == "1";
    else if (key == "dlse") dlse = value == "1";
    else if (key == "accumulate") accumulate = value == "1";
    else if (key == "keyless") keyless = value == "1";
    else if (key == "dout") dout = value;
    else if (key == "grad") grad = value;
    else if (key == "small") small = value;
    else if (key == "schedule") schedule = std::stoi(value);
    else if (key == "smem") smem = std::stoul(value);
    else if (key == "gpu") gpu = std::stoi(value);
    else if (key == "multiprocessors") multiprocessors = std::stoi(value);
    else read_of_decoding(word, key, value);
  }

  void read_of_decoding(const std::string& word, const std::string& key, const std::string& value) {
    if (word == "op=decode") decode = true;
    else if (key == "filled") filled = list(value);
    else if (key == "leftpad") leftpad = list(value);
    else if (key == "batch_idx") batch_idx = value == "1";
    else if (key == "page") page = std::stoll(value);
    else if (key == "hole") hole = value == "1";
    else if (key == "new") new_keys = std::stoll(value);
    else if (key == "rotary") rotary = std::stoll(value);
    else if (key == "rotary_seqlens") rotary_seqlens = list(value);
    else if (key == "halves") halves = value == "1";
    else if (key == "tree") tree = value == "1";
    else if (key == "latent") latent = value == "1";
    else if (key == "ragged") ragged = value == "1";
    else if (key == "cache") cache = value;
    else if (key == "scales") scales = value;
    else if (key == "splits") splits = std::stoll(value);
    else if (key == "split_size") split_size = std::stoll(value);
    else throw std::invalid_argument("no option: " + word);
  }
};

}  // namespace driver
