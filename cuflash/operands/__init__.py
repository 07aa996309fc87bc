"""Arrays without their values: shapes, strides, and what they broadcast to."""
