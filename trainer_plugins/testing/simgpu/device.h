// Torch's device interface besides memory and kernels: the current device, streams, events, generators, pinned memory.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>

#include <chrono>
#include <unordered_set>

#include "kernels.h"

namespace simgpu {

// Host memory that knows it is pinned: a DataLoader asks for it, and nothing here is any faster for it.
class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t num_bytes) override {
    if (num_bytes == 0) {
      return {nullptr, nullptr, &release, c10::Device(c10::kCPU)};
    }
    void* memory = c10::alloc_cpu(num_bytes);
    std::lock_guard<std::mutex> lock(mutex_);
    pinned_.insert(memory);
    return {memory, memory, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* dest, const void* src, size_t count) const override { std::memcpy(dest, src, count); }

  bool owns(const void* memory) {
    std::lock_guard<std::mutex> lock(mutex_);
    return pinned_.count(const_cast<void*>(memory)) > 0;
  }

  static PinnedAllocator& instance() {
    static auto* allocator = new PinnedAllocator;  // never destroyed, as the device's allocator
    return *allocator;
  }

 private:
  static void release(void* memory) {
    if (memory) {
      {
        std::lock_guard<std::mutex> lock(instance().mutex_);
        instance().pinned_.erase(memory);
      }
      c10::free_cpu(memory);
    }
  }

  std::mutex mutex_;
  std::unordered_set<void*> pinned_;
};

// Random numbers come from the CPU's default generator: the kernels are the CPU's, a run here draws the same numbers
// as a run there, and the Trainer, which saves the CPU's state and that of the accelerators it knows, resumes exactly.
struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex /*device*/) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(num_device_indices.load()); }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    check_device(c10::Device(c10::DeviceType::PrivateUse1, device));
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex /*device*/) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex /*device*/) const override { return 0; }
  at::Device getDeviceFromPtr(void* /*data*/) const override { return kDevice; }
  at::Generator getNewGenerator(c10::DeviceIndex /*device*/) const override { return at::detail::createCPUGenerator(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex /*device*/) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  bool isPinnedPtr(const void* data) const override { return PinnedAllocator::instance().owns(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &PinnedAllocator::instance(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override {
    c10::StorageImpl& impl = *storage.unsafeGetStorageImpl();
    c10::DataPtr resized = device_allocator().allocate(num_bytes);
    if (const size_t kept = std::min(num_bytes, impl.nbytes())) {
      std::memcpy(resized.get(), impl.data(), kept);
    }
    impl.set_data_ptr_noswap(std::move(resized));
    impl.set_nbytes(num_bytes);
  }
};

// One stream on which work is done as soon as it is asked for: an event has always happened, at the time of its
// recording.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  using Clock = std::chrono::steady_clock;
  // Memory is that of one card, the first; only tensors without bytes are ever on another.
  static c10::Stream stream(c10::Device device) {
    return c10::Stream(c10::Stream::DEFAULT, device.has_index() ? device : kDevice);
  }

  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }
  c10::Device getDevice() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device /*device*/) const override { return kDevice; }
  void setDevice(c10::Device device) const override { check_device(device); }
  void uncheckedSetDevice(c10::Device /*device*/) const noexcept override {}
  // Autograd starts a thread for each.
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(num_device_indices.load());
  }
  c10::Stream getStream(c10::Device device) const override { return stream(device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool /*high*/) const override { return stream(device); }
  c10::Stream getNewStream(c10::Device device, int /*priority*/) const override { return stream(device); }
  c10::Stream exchangeStream(c10::Stream before) const override { return stream(before.device()); }
  bool queryStream(const c10::Stream& /*stream*/) const override { return true; }
  void synchronizeStream(const c10::Stream& /*stream*/) const override {}
  void synchronizeDevice(c10::DeviceIndex /*device*/) const override {}

  void record(void** event, const c10::Stream& /*s*/, c10::DeviceIndex /*d*/, c10::EventFlag /*f*/) const override {
    if (!*event) {
      *event = new Clock::time_point;
    }
    *static_cast<Clock::time_point*>(*event) = Clock::now();
  }
  void block(void* /*event*/, const c10::Stream& /*stream*/) const override {}
  bool queryEvent(void* /*event*/) const override { return true; }
  void synchronizeEvent(void* /*event*/) const override {}
  void destroyEvent(void* event, c10::DeviceIndex /*device*/) const noexcept override {
    delete static_cast<Clock::time_point*>(event);
  }
  double elapsedTime(void* start, void* end, c10::DeviceIndex /*device*/) const override {  // in milliseconds
    const auto elapsed = *static_cast<Clock::time_point*>(end) - *static_cast<Clock::time_point*>(start);
    return std::chrono::duration<double, std::milli>(elapsed).count();
  }
};

}  // namespace simgpu
