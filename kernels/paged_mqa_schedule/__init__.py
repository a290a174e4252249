"""CTA schedules of paged MQA logits."""
