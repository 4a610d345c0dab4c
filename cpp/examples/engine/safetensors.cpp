#include "safetensors.h"

#include <cstring>
#include <fstream>
#include <iterator>
#include <stdexcept>

namespace {

[[noreturn]] void fail(const std::string& what) {
  throw std::runtime_error("safetensors: " + what);
}

// As much of JSON as headers have: objects, arrays of integers, strings without \u.
class Parser {
 public:
  Parser(const char* begin, const char* end) : at_(begin), end_(end) {}

  char peek() {
    while (at_ != end_ && std::strchr(" \t\r\n", *at_) != nullptr) ++at_;
    if (at_ == end_) fail("the header ends too early");
    return *at_;
  }

  void expect(char c) {
    if (peek() != c) fail(std::string("expected ") + c + " in the header");
    ++at_;
  }

  std::string string() {
    expect('"');
    std::string result;
    for (; at_ != end_ && *at_ != '"'; ++at_) {
      if (*at_ == '\\' && (++at_ == end_ || std::strchr("\"\\/", *at_) == nullptr)) {
        fail("a name has an escape sequence that is not read here");
      }
      result += *at_;
    }
    expect('"');
    return result;
  }

  int64_t integer() {
    constexpr int64_t kLargest = int64_t{1} << 56;
    if (peek() < '0' || peek() > '9') fail("expected a number in the header");
    int64_t result = 0;
    for (; at_ != end_ && *at_ >= '0' && *at_ <= '9'; ++at_) {
      result = result * 10 + (*at_ - '0');
      if (result > kLargest) fail("a number in the header is too large");
    }
    return result;
  }

  // Calls item() before each comma and the closing bracket.
  template <class Item>
  void list(char open, char close, const Item& item) {
    expect(open);
    if (peek() == close) return expect(close);
    for (item(); peek() == ','; item()) expect(',');
    expect(close);
  }

  template <class Member>
  void object(const Member& member) {
    list('{', '}', [&] {
      const std::string name = string();
      expect(':');
      member(name);
    });
  }

  std::vector<int64_t> integers() {
    std::vector<int64_t> result;
    list('[', ']', [&] { result.push_back(integer()); });
    return result;
  }

 private:
  const char* at_;
  const char* end_;
};

// The bytes that tensors lie in. Without this, a small file whose tensors are all the same bytes
// would take any amount of memory.
class Places {
 public:
  void add(int64_t begin, int64_t end, const std::string& name) {
    if (begin == end) return;
    const auto next = ends_.lower_bound(begin);
    if ((next != ends_.end() && next->first < end) ||
        (next != ends_.begin() && std::prev(next)->second > begin)) {
      fail(name + " overlaps another tensor");
    }
    ends_[begin] = end;
  }

 private:
  std::map<int64_t, int64_t> ends_;  // by beginning
};

}  // namespace

SafeTensors read_safetensors(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) fail("cannot open " + path);
  const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), {});
  uint64_t header = 0;
  if (bytes.size() < sizeof header) fail(path + " is too short");
  std::memcpy(&header, bytes.data(), sizeof header);
  if (header > bytes.size() - sizeof header) fail(path + " is too short for its header");
  const char* const data = bytes.data() + sizeof header + header;
  const int64_t available = bytes.data() + bytes.size() - data;

  SafeTensors result;
  Places places;
  Parser json(bytes.data() + sizeof header, data);
  json.object([&](const std::string& name) {
    if (name == "__metadata__") {
      json.object([&](const std::string& key) { result.metadata[key] = json.string(); });
      return;
    }
    std::string dtype;
    std::vector<int64_t> offsets;
    Weight& weight = result.weights[name];
    json.object([&](const std::string& key) {
      if (key == "dtype") {
        dtype = json.string();
      } else if (key == "shape") {
        weight.shape = json.integers();
      } else if (key == "data_offsets") {
        offsets = json.integers();
      } else {
        fail(name + " has a member " + key);
      }
    });
    int64_t size = sizeof(float);
    for (const int64_t extent : weight.shape) {
      if (extent != 0 && size > available / extent) fail(name + " is larger than the file");
      size *= extent;
    }
    if (dtype != "F32") fail(name + " is " + dtype + "; F32 is read here");
    if (offsets.size() != 2 || offsets[0] > available || offsets[1] - offsets[0] != size ||
        offsets[1] > available) {
      fail(name + " has data_offsets that do not fit its shape and the file");
    }
    places.add(offsets[0], offsets[1], name);
    weight.data.resize(static_cast<std::size_t>(size) / sizeof(float));
    std::memcpy(weight.data.data(), data + offsets[0], static_cast<std::size_t>(size));
  });
  return result;
}
