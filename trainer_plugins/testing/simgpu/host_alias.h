// Tensors of this device already lie in host memory, so the CPU's kernels can work on their bytes in place: an alias
// is a CPU tensor over the same bytes. at::native::cpu_fallback, made for devices with memory of their own, copies
// there and back instead; that doubles the work and does not write through TensorLists in place as the foreach
// optimizers need.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/SmallVector.h>

#include <vector>

#include "allocator.h"

namespace simgpu {

inline bool on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == c10::DeviceType::PrivateUse1;
}

// The aliases of one call. The same tensor given twice is the same alias, and two views of one storage are two views of
// one aliased storage: kernels compare these to find out that an output is also an input.
class HostAliases {
 public:
  at::Tensor to_host(const at::Tensor& tensor) {
    if (!on_device(tensor)) {
      return tensor;
    }
    for (const auto& [device, host] : tensors_) {
      if (device.is_same(tensor)) {
        return host;
      }
    }
    c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
    at::Tensor host = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(host_storage(tensor.storage())), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    host.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset());
    host.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
    if (impl->is_wrapped_number()) {  // a Python number: it must not widen the dtype of the result
      host.unsafeGetTensorImpl()->set_wrapped_number(true);
    }
    host._set_conj(tensor.is_conj());
    host._set_neg(tensor.is_neg());
    tensors_.push_back({tensor, host});
    return host;
  }

  // Kernels may resize an output (out=torch.empty(0)), which gives the alias another storage or another shape.
  void write_back_sizes() {
    for (Storages& shared : storages_) {
      if (shared.host.data() != shared.bytes || shared.host.nbytes() != shared.device.nbytes()) {
        c10::DataPtr grown = device_allocator().allocate(shared.host.nbytes());
        if (grown.get()) {
          std::memcpy(grown.get(), shared.host.data(), shared.host.nbytes());
        }
        shared.device.set_data_ptr_noswap(std::move(grown));
        shared.device.set_nbytes(shared.host.nbytes());
      }
    }
    for (const auto& [device, host] : tensors_) {
      c10::TensorImpl* impl = device.unsafeGetTensorImpl();
      if (host.sizes() != device.sizes() || host.strides() != device.strides()) {
        impl->set_sizes_and_strides(host.sizes(), host.strides());
      }
      if (host.storage_offset() != device.storage_offset()) {
        impl->set_storage_offset(host.storage_offset());
      }
    }
  }

  // A result of a CPU kernel: one of the arguments, a view of one, or a new tensor, which is copied into device memory
  // so that it is accounted for.
  at::Tensor to_device(const at::Tensor& host) {
    if (!host.defined() || !host.is_cpu()) {
      return host;
    }
    TORCH_CHECK_NOT_IMPLEMENTED(host.layout() == c10::kStrided, "simgpu has dense tensors only, got ", host.layout());
    for (const auto& [device, alias] : tensors_) {
      if (alias.is_same(host)) {
        return device;
      }
    }
    at::Tensor device = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(device_storage(host.storage())), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), host.dtype());
    device.unsafeGetTensorImpl()->set_storage_offset(host.storage_offset());
    device.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides());
    device._set_conj(host.is_conj());
    device._set_neg(host.is_neg());
    return device;
  }

  // The same for values on the interpreter's stack: tensors, lists of tensors, lists of lists (the collectives).
  c10::IValue to_host(const c10::IValue& value) {
    return convert(value, [this](const at::Tensor& tensor) { return to_host(tensor); });
  }
  c10::IValue to_device(const c10::IValue& value) {
    return convert(value, [this](const at::Tensor& tensor) { return to_device(tensor); });
  }

  // The storages of the aliases; each keeps the bytes of the device's alive.
  std::vector<c10::Storage> host_storages() const {
    std::vector<c10::Storage> hosts;
    for (const Storages& shared : storages_) {
      hosts.push_back(shared.host);
    }
    return hosts;
  }

 private:
  struct Storages {
    c10::Storage device, host;
    const void* bytes;  // where both began
  };

  template <class Function>
  static c10::IValue convert(const c10::IValue& value, const Function& function) {
    if (value.isTensor()) {
      return function(value.toTensor());
    }
    if (value.isTensorList()) {
      c10::List<at::Tensor> result;
      for (const at::Tensor& tensor : value.toTensorVector()) {
        result.push_back(function(tensor));
      }
      return result;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> result;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
        result.push_back(tensor ? std::optional<at::Tensor>(function(*tensor)) : std::nullopt);
      }
      return result;
    }
    if (value.isList() && value.toListRef().size() > 0 && value.toListRef()[0].isTensorList()) {
      c10::List<c10::List<at::Tensor>> result;
      for (const c10::IValue& inner : value.toListRef()) {
        result.push_back(convert(inner, function).toTensorList());
      }
      return result;
    }
    return value;
  }

  const c10::Storage& host_storage(const c10::Storage& device) {
    for (const Storages& shared : storages_) {
      if (shared.device.unsafeGetStorageImpl() == device.unsafeGetStorageImpl()) {
        return shared.host;
      }
    }
    // The alias keeps the bytes alive: a collective of gloo goes on after the call that started it.
    void* bytes = device.unsafeGetStorageImpl()->mutable_data();
    auto* owner = new c10::Storage(device);
    c10::DataPtr data(bytes, owner, [](void* p) { delete static_cast<c10::Storage*>(p); }, c10::Device(c10::kCPU));
    c10::Storage host(
        c10::Storage::use_byte_size_t(), device.nbytes(), std::move(data), c10::GetCPUAllocator(), /*resizable=*/true);
    storages_.push_back({device, std::move(host), bytes});
    return storages_.back().host;
  }

  const c10::Storage& device_storage(const c10::Storage& host) {
    for (const Storages& shared : storages_) {
      if (shared.host.unsafeGetStorageImpl() == host.unsafeGetStorageImpl()) {
        return shared.device;
      }
    }
    c10::DataPtr data = device_allocator().allocate(host.nbytes());
    if (data.get()) {
      std::memcpy(data.get(), host.data(), host.nbytes());
    }
    c10::Storage device(
        c10::Storage::use_byte_size_t(), host.nbytes(), std::move(data), &device_allocator(), /*resizable=*/true);
    storages_.push_back({std::move(device), host, host.data()});
    return storages_.back().device;
  }

  c10::SmallVector<std::pair<at::Tensor, at::Tensor>, 6> tensors_;  // device, host
  c10::SmallVector<Storages, 6> storages_;
};

}  // namespace simgpu
