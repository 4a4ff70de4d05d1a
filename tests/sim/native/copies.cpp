// Copies between host and device, and between devices.
#include "sim.h"

namespace sim {

// The bytes between a tensor's first and last element.
Span span_of(const at::Tensor& tensor) {
  if (!tensor.numel()) return {};
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  auto* base = static_cast<char*>(tensor.storage().data_ptr().get());
  if (!base) return {};
  size_t item = tensor.element_size();
  return {base + tensor.storage_offset() * item, static_cast<size_t>(last + 1) * item};
}

namespace {

// A CPU view that owns nothing: a queued copy must not keep device memory alive, its block does that.
at::Tensor bare_view(const at::Tensor& tensor) {
  const auto& storage = tensor.storage();
  c10::DataPtr data(storage.data_ptr().get(), c10::Device(c10::kCPU));
  auto bare = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), storage.nbytes(),
                                                    std::move(data), nullptr, false);
  return cpu_alias(tensor, c10::Storage(std::move(bare)));
}

bool alike(const at::Tensor& src, const at::Tensor& dst) {
  return src.scalar_type() == dst.scalar_type() && src.sizes().equals(dst.sizes()) && src.is_conj() == dst.is_conj() &&
         src.is_neg() == dst.is_neg();
}

bool same_bytes(const at::Tensor& src, const at::Tensor& dst) {
  if (!alike(src, dst)) return false;
  if (src.is_contiguous() && dst.is_contiguous()) return true;
  return src.strides().equals(dst.strides()) && src.is_non_overlapping_and_dense();
}

std::function<void()> copier(const at::Tensor& src, const at::Tensor& dst) {
  if (same_bytes(src, dst)) {
    Span from = span_of(src), to = span_of(dst);
    return [from, to] { std::memcpy(to.ptr, from.ptr, to.size); };
  }
  at::Tensor from = bare_view(src), to = bare_view(dst);
  return [from, to]() mutable {
    // It runs in whatever state the thread that waits for it is in: a mode of that thread has no say in it.
    c10::impl::ExcludeDispatchKeyGuard no_modes(c10::python_ks);
    at::AutoDispatchBelowADInplaceOrView guard;
    to.copy_(from);
  };
}

// Element by element where there are gaps: these belong to somebody else.
void poison(const at::Tensor& tensor, int64_t dim, char* ptr) {
  auto item = static_cast<int64_t>(tensor.element_size());
  if (dim == tensor.dim()) {
    std::memset(ptr, kPoison, item);
    return;
  }
  for (int64_t i = 0; i < tensor.size(dim); ++i) poison(tensor, dim + 1, ptr + i * tensor.stride(dim) * item);
}

std::function<void()> poisoner(const at::Tensor& dst) {
  Span span = span_of(dst);
  if (dst.is_non_overlapping_and_dense()) return [span] { std::memset(span.ptr, kPoison, span.size); };
  return [view = bare_view(dst), span] { poison(view, 0, span.ptr); };
}

void count_copy(const at::Tensor& src, const at::Tensor& dst, bool pinned) {
  Counters& c = state().count;
  auto bytes = static_cast<int64_t>(dst.numel() * dst.element_size());
  if (src.is_cpu()) {
    ++c.h2d;
    c.h2d_bytes += bytes;
    ++(pinned ? c.h2d_pinned : c.h2d_pageable);
  } else if (dst.is_cpu()) {
    ++c.d2h;
    c.d2h_bytes += bytes;
    ++(pinned ? c.d2h_pinned : c.d2h_pageable);
  } else {
    ++c.d2d;
    c.d2d_bytes += bytes;
  }
}

void copy_now(const at::Tensor& src, const at::Tensor& dst, int stream) {
  uint64_t seq = begin_op(stream);
  touch(span_of(src), !src.is_cpu(), stream, seq, false, "copy");
  touch(span_of(dst), !dst.is_cpu(), stream, seq, true, "copy");
  copier(src, dst)();
}

void copy_later(const at::Tensor& src, const at::Tensor& dst, int stream) {
  State& s = state();
  Command command;
  command.src = span_of(src);
  command.dst = span_of(dst);
  auto block_of = [&](const at::Tensor& t, const Span& span) {
    return find_block(t.is_cpu() ? s.host_blocks : s.device_blocks, span.ptr, span.size);
  };
  command.src_block = block_of(src, command.src);
  command.dst_block = block_of(dst, command.dst);
  if (!command.src_block || !command.dst_block) return copy_now(src, dst, stream);
  const at::Tensor& host = src.is_cpu() ? src : dst;
  if (block_of(host, span_of(host))->kind == Kind::Registered) command.keep.push_back(host.storage());
  command.run = copier(src, dst);
  command.poison = poisoner(dst);
  enqueue(stream, std::move(command));
}

// As on CUDA, the copy runs on the source's stream, ordered after and before the destination's.
void copy_between_devices(const at::Tensor& src, const at::Tensor& dst) {
  int from = current_stream_index(src.device().index()), to = current_stream_index(dst.device().index());
  auto& streams = state().streams;
  streams[from].clock.join(streams[to].clock);
  copy_now(src, dst, from);
  streams[to].clock.join(streams[from].clock);
}

}  // namespace

at::Tensor copy_from(const at::Tensor& src, const at::Tensor& dst, bool non_blocking) {
  if (!dst.numel()) return dst;
  Locked lock;
  if (!src.is_cpu() && !dst.is_cpu()) {
    count_copy(src, dst, false);
    if (src.device() != dst.device()) copy_between_devices(src, dst);
    else copy_now(src, dst, current_stream_index(dst.device().index()));
    return dst;
  }
  const at::Tensor &host = src.is_cpu() ? src : dst, &device = src.is_cpu() ? dst : src;
  Span span = span_of(host);
  bool pinned = is_pinned_range(span.ptr, span.size);
  int stream = current_stream_index(device.device().index());
  count_copy(src, dst, pinned);
  // Anything that needs a conversion or a gather on the host goes through a pageable temporary, as on CUDA.
  bool plain = alike(src, dst) && host.is_non_overlapping_and_dense();
  if (non_blocking && pinned && plain) {
    copy_later(src, dst, stream);
    return dst;
  }
  copy_now(src, dst, stream);
  ++state().count.implicit_syncs;
  host_waits_for(state().streams[stream].clock);
  return dst;
}

}  // namespace sim
