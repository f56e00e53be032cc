// Every operation without a kernel of its own runs on the CPU, on aliases of its arguments.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <string>

#include "host_alias.h"

namespace simgpu {

// On a real card an operation refuses tensors of another device, except for numbers (0 dimensions) and the few listed
// here; it would be a poor test bed that lets `model(input_ids)` pass with the ids left on the CPU.
inline bool takes_host_tensors(const c10::OperatorHandle& op) {
  const std::string& name = op.schema().name();
  for (const char* exception :
       {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index",
        "aten::_unsafe_index_put", "aten::_pack_padded_sequence"}) {
    if (name == exception) {
      return true;
    }
  }
  return false;
}

inline void check_same_device(const c10::OperatorHandle& op, const at::Tensor& tensor) {
  TORCH_CHECK(
      on_device(tensor) || !tensor.defined() || tensor.dim() == 0 || tensor.numel() == 0 || takes_host_tensors(op),
      "Expected all tensors to be on the same device, but found at least two devices, simgpu:0 and ", tensor.device(),
      "! (when checking argument in method ", op.schema().name(), ")");
}

inline void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  HostAliases aliases;
  const size_t num_arguments = op.schema().arguments().size();
  const size_t first_argument = stack->size() - num_arguments;
  for (size_t i = first_argument; i < stack->size(); ++i) {
    c10::IValue& value = (*stack)[i];
    if (value.isTensor()) {
      check_same_device(op, value.toTensor());
      value = aliases.to_host(value);
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) {
        check_same_device(op, tensor);
      }
      value = aliases.to_host(value);
    } else if (value.isDevice()) {
      value = c10::Device(c10::kCPU);
    } else if (value.isList()) {
      value = aliases.to_host(value);
    }
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  aliases.write_back_sizes();
  const size_t first_return = stack->size() - op.schema().returns().size();
  for (size_t i = first_return; i < stack->size(); ++i) {
    (*stack)[i] = aliases.to_device((*stack)[i]);
  }
}

}  // namespace simgpu
