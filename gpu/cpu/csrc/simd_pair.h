// A vector of two registers, or of two such pairs. Every operation applies to both halves, which are members and not an
// array, so that compilers keep them in registers. The type of a half and its functions must be declared before.
#pragma once

namespace headrace {

template <class V>
struct Pair {
    V low, high;

    auto operator[](int lane) const {
        constexpr int kHalf = sizeof(V) / sizeof(V{}[0]);
        return lane < kHalf ? low[lane] : high[lane - kHalf];
    }
};

template <class V>
struct Memory<Pair<V>> {  // half by half: as a whole it would be copied through the stack
    static Pair<V> load(const void* from) {
        return {Memory<V>::load(from), Memory<V>::load((const char*)from + sizeof(V))};
    }
    static void store(void* to, Pair<V> value) {
        Memory<V>::store(to, value.low);
        Memory<V>::store((char*)to + sizeof(V), value.high);
    }
};

#define HEADRACE_BOTH(operation)                                                                               \
    template <class V>                                                                                         \
    inline auto operator operation(Pair<V> a, Pair<V> b) {                                                     \
        return Pair<decltype(a.low operation b.low)>{a.low operation b.low, a.high operation b.high};          \
    }
HEADRACE_BOTH(+)
HEADRACE_BOTH(-)
HEADRACE_BOTH(*)
HEADRACE_BOTH(/)
HEADRACE_BOTH(&)
HEADRACE_BOTH(|)
HEADRACE_BOTH(<)
HEADRACE_BOTH(>)
HEADRACE_BOTH(==)
#undef HEADRACE_BOTH

#define HEADRACE_EACH(function)                                             \
    template <class V>                                                      \
    inline auto function(Pair<V> x) {                                       \
        using Half = decltype(function(x.low));                             \
        return Pair<Half>{function(x.low), function(x.high)}; \
    }
HEADRACE_EACH(as_f32)
HEADRACE_EACH(as_u32)
HEADRACE_EACH(as_i32)
HEADRACE_EACH(to_f32)
#undef HEADRACE_EACH

template <class V>
inline Pair<V> operator-(Pair<V> x) {
    return {-x.low, -x.high};
}

template <class V>
inline Pair<V> operator<<(Pair<V> x, int bits) {
    return {x.low << bits, x.high << bits};
}

template <class V>
inline Pair<V> operator>>(Pair<V> x, int bits) {
    return {x.low >> bits, x.high >> bits};
}

template <class M, class V>
inline Pair<V> select(Pair<M> mask, Pair<V> a, Pair<V> b) {
    return {select(mask.low, a.low, b.low), select(mask.high, a.high, b.high)};
}

template <class V>
inline Pair<V> fma(Pair<V> a, Pair<V> b, Pair<V> c) {
    return {fma(a.low, b.low, c.low), fma(a.high, b.high, c.high)};
}

template <class V>
inline Pair<V> max(Pair<V> a, Pair<V> b) {
    return {max(a.low, b.low), max(a.high, b.high)};
}

template <class V>
inline auto sum(Pair<V> x) {
    return sum(x.low + x.high);
}

template <class V>
inline float largest(Pair<V> x) {
    return largest(max(x.low, x.high));
}

// sums[j] += weights[2j] * x[0] + weights[2j + 1] * x[1], with pairs of bfloat16.
template <class V, class W>
inline Pair<V> dot_bf16(Pair<V> sums, Pair<W> weights, W x) {
    return {dot_bf16(sums.low, weights.low, x), dot_bf16(sums.high, weights.high, x)};
}

}  // namespace headrace
