// engine MODEL.safetensors LOGITS CHUNK TOKEN...
//
// Feeds the tokens to the model in chunks of CHUNK (1: one after the other, as generation does) and
// writes the logits after each token, float32, to the file LOGITS.
#include <algorithm>
#include <exception>
#include <fstream>
#include <iostream>
#include <stdexcept>
#include <string>
#include <vector>

#include "model.h"

int main(int argc, char** argv) try {
  if (argc < 5) {
    std::cerr << "usage: engine MODEL.safetensors LOGITS CHUNK TOKEN...\n";
    return 2;
  }
  Model model(argv[1]);
  std::ofstream file(argv[2], std::ios::binary);
  const std::size_t chunk = std::stoul(argv[3]);
  std::vector<int32_t> tokens;
  for (int i = 4; i < argc; ++i) tokens.push_back(std::stoi(argv[i]));
  for (std::size_t begin = 0; begin < tokens.size();) {
    const std::size_t end = std::min(tokens.size(), begin + std::max<std::size_t>(chunk, 1));
    const std::vector<float> logits = model.forward({&tokens[begin], &tokens[begin] + end - begin});
    file.write(reinterpret_cast<const char*>(logits.data()),
               static_cast<std::streamsize>(logits.size() * sizeof(float)));
    begin = end;
  }
  if (!file.flush()) throw std::runtime_error(std::string("cannot write ") + argv[2]);
  std::cout << "anyflash " << anyflash::build_info().version << ": " << tokens.size()
            << " tokens\n";
  return 0;
} catch (const std::exception& error) {
  std::cerr << "engine: " << error.what() << '\n';
  return 1;
}
