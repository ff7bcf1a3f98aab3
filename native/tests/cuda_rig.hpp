// A core over device memory and pinned memory of a CUDA device.
//
// "Kernels" are the driver's own: a fill and a copy on the compute stream, which is held by a wait
// for a value in pinned memory.
#pragma once

#include <dlfcn.h>

#include <cstring>

#include "cuda/cuda_backend.hpp"
#include "rig.hpp"

namespace forebay {

inline bool cuda_device_here() {
  try {
    if (cuda::device_count() > 0) return true;
    std::puts("skipped: the driver sees no CUDA device");
  } catch (const SettingsError& why) {
    std::printf("skipped: %s\n", why.what());
  }
  return false;
}

class CudaRig : public CoreRig {
 public:
  static constexpr std::int64_t kSlots = Rig::kSlots;
  static constexpr std::int64_t kBlock = Rig::kBlock;

  CudaRig(std::unique_ptr<OrderingRules> rules, std::uint64_t)
      : driver_(cuda::Driver::get()), context_(0), scope_(context_) {
    void* library = dlopen("libcuda.so.1", RTLD_NOW);
    allocate_ = reinterpret_cast<Allocate>(dlsym(library, "cuMemAlloc_v2"));
    free_ = reinterpret_cast<Free>(dlsym(library, "cuMemFree_v2"));
    fill_ = reinterpret_cast<Fill>(dlsym(library, "cuMemsetD8Async"));
    synchronize_ = reinterpret_cast<Synchronize>(dlsym(library, "cuCtxSynchronize"));
    check(allocate_(&device_, kSlots * kBlock));
    host_ = static_cast<std::byte*>(pinned(kSlots * kBlock));
    gate_ = static_cast<volatile std::uint32_t*>(pinned(64));
    check(driver_.create_stream(&stream_, cuda::kStreamNonBlocking, 0));
    compute = reinterpret_cast<StreamHandle>(stream_);
    for (std::int64_t slot = 0; slot < kSlots; ++slot) {
      launch_fill(slot, static_cast<int>(0x10 + slot));
      Rig::fill(host_ + slot * kBlock, static_cast<int>(0x80 + slot));
    }
    check(synchronize_());
    auto backend = std::make_unique<cuda::CudaBackend>(cuda::BackendSettings{});
    hooks = backend.get();
    const auto layout = [](std::uint64_t at) {
      return PoolLayout(at, kSlots, {{0, kBlock, kBlock}});
    };
    core = std::make_unique<Core>(Settings{kBlock, 2, 60.0, 1 << 16, 1 << 14}, layout(device_),
                                  layout(reinterpret_cast<std::uint64_t>(host_)),
                                  std::move(backend), std::move(rules));
  }
  ~CudaRig() {
    release_compute();
    core.reset();
    synchronize_();
    driver_.destroy_stream(stream_);
    driver_.free_host(const_cast<std::uint32_t*>(gate_));
    driver_.free_host(host_);
    free_(device_);
  }
  CudaRig(const CudaRig&) = delete;
  CudaRig& operator=(const CudaRig&) = delete;

  void launch_fill(std::int64_t slot, int value) {
    check(fill_(at(slot), static_cast<unsigned char>(value), kBlock, stream_));
  }
  void hold_compute() {
    *gate_ = 0;
    check(driver_.wait_value(stream_, reinterpret_cast<cuda::Address>(gate_), 1,
                             cuda::kWaitValueEqual));
  }
  void release_compute() { *gate_ = 1; }
  bool device_holds(std::int64_t slot, int value) {
    check(synchronize_());
    std::vector<std::byte> seen(kBlock);
    check(driver_.copy(reinterpret_cast<cuda::Address>(seen.data()), at(slot), kBlock, stream_));
    check(synchronize_());
    return Rig::holds(seen.data(), value);
  }
  bool host_holds(std::int64_t slot, int value) {
    return Rig::holds(host_ + slot * kBlock, value);
  }

  // What the compute stream read of some device slots when it came to that point.
  class Snapshot {
   public:
    ~Snapshot() {
      if (rig_ == nullptr) return;
      rig_->release_compute();
      rig_->synchronize_();
      rig_->driver_.destroy_event(event_);
      rig_->driver_.free_host(seen_);
    }
    void take(CudaRig& rig, const Slots& slots, std::int64_t bytes = kBlock) {
      rig_ = &rig;
      seen_ = static_cast<std::byte*>(rig.pinned(slots.size() * kBlock));
      check(rig.driver_.create_event(&event_, cuda::kEventDisableTiming));
      for (std::size_t i = 0; i < slots.size(); ++i) {
        const auto to = reinterpret_cast<cuda::Address>(seen_ + i * kBlock);
        check(rig.driver_.copy(to, rig.at(slots[i]), static_cast<std::size_t>(bytes), rig.stream_));
      }
      check(rig.driver_.record_event(event_, rig.stream_));
    }
    bool taken(double within_s = 10) {
      const auto until = Clock::now() + bounded(within_s);
      while (rig_->driver_.query_event(event_) != cuda::kSuccess) {
        if (Clock::now() >= until) return false;
        std::this_thread::sleep_for(std::chrono::microseconds(50));
      }
      return true;
    }
    bool saw(std::size_t i, int value, std::int64_t bytes = kBlock) {
      return Rig::holds(seen_ + i * kBlock, value, bytes);
    }

   private:
    CudaRig* rig_ = nullptr;
    cuda::EventHandle event_ = nullptr;
    std::byte* seen_ = nullptr;
  };

 private:
  using Allocate = cuda::Result (*)(cuda::Address*, std::size_t);
  using Free = cuda::Result (*)(cuda::Address);
  using Fill = cuda::Result (*)(cuda::Address, unsigned char, std::size_t, cuda::Stream);
  using Synchronize = cuda::Result (*)();

  void* pinned(std::size_t bytes) const {
    void* memory = nullptr;
    check(driver_.allocate_host(&memory, bytes, cuda::kHostPortable));
    return memory;
  }
  cuda::Address at(std::int64_t slot) const {
    return device_ + static_cast<cuda::Address>(slot * kBlock);
  }
  static void check(cuda::Result result) {
    cuda::Driver::get().check("a call of the rig", result);
  }

  const cuda::Driver& driver_;
  const cuda::DeviceContext context_;
  const cuda::DeviceContext::Scope scope_;
  Allocate allocate_ = nullptr;
  Free free_ = nullptr;
  Fill fill_ = nullptr;
  Synchronize synchronize_ = nullptr;
  cuda::Address device_ = 0;
  std::byte* host_ = nullptr;
  volatile std::uint32_t* gate_ = nullptr;
  cuda::Stream stream_ = nullptr;
};

}  // namespace forebay
