// A decoder of transformer blocks as Llama has them, with its cache of keys and values. Attention,
// rotary embedding and the cache's upkeep are anyflash's; the rest is plain loops.
#pragma once

#include <anyflash/attention.h>

#include <cstdint>
#include <string>
#include <vector>

#include "safetensors.h"

// Memory for anyflash, which allocates none itself. It grows to the largest size asked for. It may
// be reused as soon as a call has returned; on a GPU, when the stream is done with it.
class WorkspaceMemory {
 public:
  anyflash::Workspace of(std::size_t bytes);

 private:
  std::vector<std::byte> memory_;
};

class Model {
 public:
  // The tensors of the file are float32. With d = heads * head_dim and dk = heads_k * head_dim, the
  // model has these:
  //   embedding (vocabulary, d), rotary_cos and rotary_sin (positions, head_dim / 2), norm (d,).
  // Each layer i has these for its attention:
  //   i.norm_attention (d,), i.q (d, d), i.k and i.v (dk, d), i.o (d, d).
  // It has these for its MLP:
  //   i.norm_mlp (d,), i.gate and i.up (hidden, d), i.down (d, hidden).
  // Its metadata: layers, heads, heads_k. The table of rotary_cos bounds the length of a text.
  explicit Model(const std::string& path);

  // Appends the tokens to the text and returns the logits after each of them, (tokens,
  // vocabulary). One call for a whole prompt, or one for each token: the results agree.
  std::vector<float> forward(const std::vector<int32_t>& tokens);

 private:
  struct Layer {
    Weight norm_attention, q, k, v, o, norm_mlp, gate, up, down;
    std::vector<float> k_cache, v_cache;  // (positions, heads_k, head_dim)
  };

  void attention(Layer& layer, std::vector<float>& x, int64_t tokens);

  int64_t heads_ = 0, heads_k_ = 0, head_dim_ = 0, width_ = 0, positions_ = 0;
  int32_t length_ = 0;  // of the text in the cache
  Weight embedding_, rotary_cos_, rotary_sin_, norm_;
  std::vector<Layer> layers_;
  WorkspaceMemory workspace_;
};
