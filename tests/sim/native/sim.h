// Shared declarations of the simulated accelerator. Every .cpp here is included into one translation unit.
//
// Time is modelled by vector clocks: each stream counts its operations, and knows up to which operation of every other
// stream it is ordered. Compute runs at once; a non-blocking copy of pinned memory is queued and runs as late as the
// ordering allows, so that a program that forgets a wait reads poison, every time.
#pragma once

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>
#include <torch/version.h>

#include <array>
#include <chrono>
#include <bitset>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#define SIM_TORCH_AT_LEAST(major, minor) \
  (TORCH_VERSION_MAJOR > (major) || (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

// The guard interface promised not to throw in older releases.
#if SIM_TORCH_AT_LEAST(2, 13)
#define SIM_GUARD_NOEXCEPT
#else
#define SIM_GUARD_NOEXCEPT noexcept
#endif

namespace sim {

constexpr int kDevices = 2;
constexpr int kPool = 32;  // side streams of one device, handed out round robin as CUDA does
constexpr int kPerDevice = kPool + 1;
constexpr int kStreams = kDevices * kPerDevice;
constexpr int64_t kCapacity = int64_t{80} << 30;  // what an unlimited device claims to have
constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr unsigned char kPoison = 0xFF;  // all ones is a NaN in every float format that torch has

// Entry s is the last operation of stream s that is known to come before.
struct Clock {
  std::array<uint64_t, kStreams> at{};
  void join(const Clock& other);
};

enum class Kind { Device, Pinned, Registered };

struct Use {
  size_t begin, end;  // bytes within the block
  int stream;
  uint64_t seq;
  bool write;
};

// One device allocation, pinned allocation or registered host range.
struct Block {
  char* ptr = nullptr;
  size_t size = 0;
  Kind kind = Kind::Device;
  int device = 0;
  int stream = 0;  // the stream it was allocated on, whose order alone protects its reuse
  int pending = 0;  // queued copies that touch it
  bool freed = false;
  std::bitset<kStreams> recorded;  // streams named by record_stream
  std::vector<Use> uses;
  ~Block();
};
using BlockRef = std::shared_ptr<Block>;

struct Span {
  char* ptr = nullptr;
  size_t size = 0;
  bool overlaps(const Span& other) const { return ptr < other.ptr + other.size && other.ptr < ptr + size; }
};

// A copy that waits in a stream's queue.
struct Command {
  uint64_t seq;
  Clock needs;  // what must have run before
  Span src, dst;
  BlockRef src_block, dst_block;  // keep the memory, whatever happens to the tensors
  std::vector<c10::Storage> keep;  // foreign host memory stays alive as long as its storage does
  std::function<void()> run, poison;
};

struct StreamState {
  uint64_t seq = 0;
  Clock clock;
  std::deque<Command> queue;
};

struct EventState {
  bool recorded = false;
  Clock clock;
  std::chrono::steady_clock::time_point when;
};

struct Counters {
  std::array<int64_t, kDevices> allocations{}, live{}, peak{};
  int64_t kernels = 0;
  int64_t h2d = 0, h2d_bytes = 0, h2d_pinned = 0, h2d_pageable = 0;
  int64_t d2h = 0, d2h_bytes = 0, d2h_pinned = 0, d2h_pageable = 0;
  int64_t d2d = 0, d2d_bytes = 0, queued = 0;
  int64_t stream_syncs = 0, device_syncs = 0, event_syncs = 0, implicit_syncs = 0;
  int64_t pinned = 0, pinned_peak = 0, pinned_reserved = 0, pinned_reserved_peak = 0;
  int64_t pinned_allocations = 0, host_registrations = 0;
};

struct State {
  std::recursive_mutex mutex;
  int depth = 0;
  std::vector<c10::Storage> garbage;  // dropped once the lock is released
  std::array<StreamState, kStreams> streams;
  std::array<int, kDevices> next_in_pool{};
  Clock host;  // what the host has waited for
  std::map<uintptr_t, BlockRef> device_blocks, host_blocks;
  std::deque<BlockRef> quarantine;  // freed device blocks, kept readable so that a stale view meets poison
  size_t quarantine_bytes = 0;
  std::vector<std::string> hazards;
  Counters count;
  std::array<int64_t, kDevices> memory_limit{-1, -1};
  int64_t pin_limit = -1;
};
State& state();

// Holds the lock. Storages that a finished copy kept alive die after it is released: their deleters may take the GIL.
struct Locked {
  Locked();
  ~Locked();
};

// streams.cpp
int current_device();
int exchange_device(int device);
int stream_index(const c10::Stream& stream);
int current_stream_index(int device);
std::string stream_name(int stream);
void satisfy(const Clock& clock);
uint64_t begin_op(int stream);
void host_waits_for(const Clock& clock);
void enqueue(int stream, Command command);
bool any_pending_overlap(const Span& span);

// memory.cpp
c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();
BlockRef find_block(std::map<uintptr_t, BlockRef>& blocks, const void* ptr, size_t size);
bool is_pinned_range(const void* ptr, size_t size);
void release_pending(const BlockRef& block);
void host_register(int64_t ptr, int64_t nbytes);
void host_unregister(int64_t ptr);

// hazards.cpp
void touch(const Span& span, bool device_memory, int stream, uint64_t seq, bool write, const std::string& what);
bool check_free(const Block& block, const char* action);
void report(const std::string& text);

// ops.cpp, copies.cpp, fallback.cpp
Span span_of(const at::Tensor& tensor);
at::Tensor cpu_alias(const at::Tensor& tensor, const c10::Storage& storage);
c10::Storage cpu_alias_storage(const c10::Storage& storage);
at::Tensor copy_from(const at::Tensor& src, const at::Tensor& dst, bool non_blocking);
void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);
const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format);
void resize_storage(const c10::Storage& storage, size_t nbytes);

}  // namespace sim
