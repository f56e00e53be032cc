// Attention in the memory of a flash kernel, as on a card: torch asks each device which kernel to take, and without an
// answer takes the one that stores the scores of every pair of tokens.
#pragma once

#include <ATen/SDPBackend.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice.h>

#include "host_alias.h"

namespace simgpu {

// The CPU's choice. Its flash kernel has no dropout, so the scores are then stored; CUDA's has it.
inline int64_t choose_attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& mask,
    double dropout, bool is_causal, std::optional<double> scale, bool enable_gqa) {
  if (mask && mask->requires_grad()) {  // T5's: an alias does not know about gradients, so the CPU cannot see it
    return static_cast<int64_t>(at::SDPBackend::math);
  }
  if (query.key_set().has(c10::DispatchKey::Python)) {  // torch.compile asks with tensors that have no bytes
    return static_cast<int64_t>(dropout > 0 ? at::SDPBackend::math : at::SDPBackend::flash_attention);
  }
  HostAliases aliases;
  const auto host_mask = mask ? std::optional<at::Tensor>(aliases.to_host(*mask)) : std::nullopt;
  return at::_fused_sdp_choice(
      aliases.to_host(query), aliases.to_host(key), aliases.to_host(value), host_mask, dropout, is_causal, scale,
      enable_gqa);
}

}  // namespace simgpu

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &simgpu::choose_attention)
}
