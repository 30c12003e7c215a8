// The state behind the accepted rows of a block (RecurrentCache.commit), from the state before it and
// the recorded changes: S <- g S + d k^T, the same additions as in gated_delta_advance.metal, without
// its sums across lanes. A simdgroup takes one row of the state.

const int lane = int(thread_index_in_simdgroup), row = int(thread_position_in_grid.y);
const int head = row / DV, d = row % DV, key_head = head / (HV / HK);

float state[(DK + 31) / 32];
for (int i = lane; i < DK; i += 32) state[i / 32] = START ? start[size_t(row) * DK + i] : 0.0f;
for (int t = 0; t < rows; t++) {
    device const float* key = keys + (size_t(t) * HK + key_head) * DK;
    const float kept = decay[t * HV + head], change = changes[(size_t(t) * HV + head) * DV + d];
    for (int i = lane; i < DK; i += 32) {
        state[i / 32] *= kept;
        state[i / 32] += change * key[i];
    }
}
for (int i = lane; i < DK; i += 32) end[size_t(row) * DK + i] = state[i / 32];
